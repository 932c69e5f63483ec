"""Images in tar shards (WebDataset's layout): made, indexed, read by position, shuffled with bounded memory."""
