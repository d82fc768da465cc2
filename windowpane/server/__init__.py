"""The server: the OpenAI API, metrics, /stats and the page that shows the memory."""
