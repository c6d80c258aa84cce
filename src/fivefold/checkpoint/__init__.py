"""State that outlives a layout: the store on disk, the pieces of tensors in it, saving in the background, loading."""
