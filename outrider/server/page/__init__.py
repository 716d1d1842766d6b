"""The page at `/`: charts of the server's metrics, and a chat box."""
