"""Traffic for the real scheduler and manager, without a model behind them."""
