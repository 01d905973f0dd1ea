"""What comes back from hosts, where no Cuebot takes it: reports, ends of frames, and what was lost on the way."""
