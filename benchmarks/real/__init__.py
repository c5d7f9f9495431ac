"""Two small published models: where they come from, and how fast they run here and in other systems."""
