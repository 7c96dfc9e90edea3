// A plan after one decode step: every growing tail has one token more, every row is one position on.
//
// One thread takes a sequence. `step` is what attention adds to the positions of the rows.
#include "vectors.cuh"

struct Params {
    int* entries;        // [E, 4] PAGE, LO | OWNER << 8 | HI << 16, POS0, RUN
    int* tails;          // [B, 3] entry of the next token, entries reserved with it, how far they are apart; -1: none
    int* step;           // [1]
    int num_sequences, page_size;
};

extern "C" __global__ void advance(const __grid_constant__ Params p) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int b = blockIdx.x * blockDim.x + threadIdx.x;
    if (b == 0) *p.step += 1;
    if (b >= p.num_sequences) return;
    int* const tail = p.tails + 3 * b;
    const int entry = tail[0], room = tail[1];
    if (entry < 0) return;
    const int rows = p.entries[4 * entry + 1] + (1 << 16);
    p.entries[4 * entry + 1] = rows;
    if (rows >> 16 == p.page_size) {
        tail[0] = room > 1 ? entry + tail[2] : -1;
        tail[1] = room > 1 ? room - 1 : 0;
        if (room <= 1) tail[2] = 1;
    }
}
