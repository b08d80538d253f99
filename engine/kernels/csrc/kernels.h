// What the kernels are to each other, and to ctypes. Sizes and strides in elements; `dtype`: 0 float32, 1 bfloat16; `int8`:
// pages hold rows of int8_rows.h, and what is said of them is in bytes.

#pragma once

#include <cstdint>

extern "C" {

struct KvrelayRotary {
    const void* qkv;  // [rows, (heads + 2 * kv_heads) * dim]: q, then k, then v
    const void* cos;  // [rows, dim]
    const void* sin;
    const void* q_norm;  // [dim] or null: a norm of each head before it is turned
    const void* k_norm;
    void* q;  // [rows, heads, dim]
    void* k_pages;
    void* v_pages;
    const int64_t* slots;
    int64_t rows, written, heads, kv_heads, dim;  // the first `written` rows go into pages
    int64_t token_stride;                         // elements from one token of a page to the next, of K and V alike
    float eps;
    int32_t plus_one, dtype, int8, threads;
};

// A token's heads stand side by side in its page; from one token to the next may be further than that: a rank's heads are
// a part of the page's. `dtype` is of q, k, v and out alike.
struct KvrelayAttention {
    const void* q;
    void* out;  // [rows, heads, v_dim]
    const void* k_pages;
    const void* v_pages;
    const float* sinks;   // [heads] or null
    const float* slopes;  // [heads] or null: taken from a score for each token between (ALiBi)
    const int32_t* query_starts;
    const int32_t* starts;
    const int32_t* block_tables;
    int64_t q_row_stride, q_head_stride, table_stride, k_token_stride, v_token_stride;
    int64_t sequences, heads, kv_heads, k_dim, v_dim, page_size;
    float scaling, softcap;
    int32_t window, chunk, dtype, int8, threads;

    // The first key that a row at this position sees, or one before all of them.
    int64_t oldest(int64_t position) const {
        if (chunk) return position - position % chunk;
        return window ? position + 1 - window : 0;
    }
};

// Of a LoRA adapter, what it adds to one Linear: (x a^T) b * scale; rank 0: nothing. Both lie in the order in which they
// are read (adapters.cpp).
struct KvrelayPart {
    const void* a;  // [rank, in]
    const void* b;  // [rank, out]
    int64_t rank;
    float scale;
};

// A product of one Linear, or of several side by side
struct KvrelaySite {
    const int64_t* numbers;  // of their parts, in an adapter's list
    const int64_t* ends;     // where their outputs end
    int64_t count;
};

// A step's rows that have adapters, in blocks of one adapter each
struct KvrelayAdapters {
    const KvrelayPart* const* parts;  // [blocks]: the adapter's list
    const int64_t *starts, *rows;     // [blocks]
    int64_t blocks;
};

void kvrelay_adapt(const void* x, void* y, int64_t in, int64_t out, const KvrelaySite* site,
                   const KvrelayAdapters* step, int32_t dtype, int32_t threads);
void kvrelay_rotate_and_write(const KvrelayRotary* args);
int kvrelay_attend(const KvrelayAttention* args);
void kvrelay_rms_norm(const void* x, const void* w, void* to, int64_t rows, int64_t n, float eps, int32_t plus_one,
                      int32_t dtype, int32_t threads);
void kvrelay_add_norm(const void* x, const void* y, const void* w, void* sum, void* to, int64_t rows, int64_t n,
                      float eps, int32_t plus_one, int32_t dtype, int32_t threads);
void kvrelay_silu_mul(const void* gate_up, void* to, int64_t rows, int64_t n, int32_t dtype, int32_t threads);
void kvrelay_product(const void* x, const void* panels, const float* scales, const void* bias, void* to, int64_t rows,
                     int64_t in, int64_t out, int32_t threads);
}
