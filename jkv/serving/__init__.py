"""An HTTP server with OpenAI's endpoints in front of one engine (extra `serve`): `jkv serve`."""
