"""A dry run: the code that trains, on fake tensors and fake ranks. run, world and fast_fake import no plan/."""
