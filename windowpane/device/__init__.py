"""What lies on a device: the arena's pages, tables, and how a step's arrays get there."""
