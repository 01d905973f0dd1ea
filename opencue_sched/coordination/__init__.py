"""Who does what: leader gate, permits of frames, cluster postings, queue names."""
