"""A plugin of pytest (`-p emulated_cuda.plugin`): the emulated card is there before anything imports torch."""

from emulated_cuda import card

card.install()
