"""The embedded engine: an OpenAI-style server with vLLM's field names that runs on a CPU.

app.py        routes and response shapes         knows HTTP, no tensors
request.py    a body becomes a checked `Job`     knows the dialect, no tensors
engine.py     the parts put together; names of models and adapters
scheduler.py  continuous batching in one thread  knows rows, no HTTP
text.py       ids become text, stop strings
sampling.py   logits become a token and its log-probabilities
policy.py     the forward pass over rows of different adapters
lora.py       adapters, unmerged
prefix.py     keys and values of prompts seen before
"""
