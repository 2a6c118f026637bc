"""The paper's three experiments (Hawkins & Zhang, arXiv 1905.10478): networks, settings, seeds, table and figures."""
