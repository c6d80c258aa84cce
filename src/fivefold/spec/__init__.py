"""Models as descriptions: numbers, parameters, presets, Hugging Face configs."""
