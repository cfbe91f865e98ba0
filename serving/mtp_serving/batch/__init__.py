"""Files of prompts: every line answered once, whatever stops the program in between."""
