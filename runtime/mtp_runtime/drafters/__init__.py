"""What proposes draft tokens; one file each."""
