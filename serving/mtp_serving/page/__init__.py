"""The page at `/`: prompt and answer for people, without a build step."""
