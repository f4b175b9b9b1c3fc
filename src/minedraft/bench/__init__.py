"""``minedraft bench``: MineDraft beside vLLM's own ways, on the same devices and the same load."""
