"""Who does what: leader gate, layer permits, cluster postings, queue names."""
