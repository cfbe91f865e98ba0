"""Files of prompts."""
