"""An HTTP endpoint for agents, with OpenAI's and Anthropic's APIs. Records the tokens generated for them."""
