/* This is what te-fl finds where cuDNN is broken: a library of its name without its functions. */
int te_fl_hollow_cudnn(void) { return 0; }
