"""Operations of layers: dropout, rotary embeddings, matrix products, attention without kernels, recurrent memory."""
