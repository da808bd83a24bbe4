/* Stands in for a broken cuDNN: a library with cuDNN's name, but without its functions. */
int te_fl_hollow_cudnn(void) { return 0; }
