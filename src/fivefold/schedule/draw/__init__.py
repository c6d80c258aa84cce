"""Pictures of schedules: SVG and PNG files, and a coloured view for the terminal."""
