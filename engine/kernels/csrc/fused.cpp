// Small element-wise operations of a decoder layer, each in one pass over memory. They round where the layers' own torch
// code rounds, so that they differ from it in the last bit at most; each row is computed alone, in a fixed order.
// Element code: 0 float32, 1 bfloat16.

#include <cmath>
#include <vector>
#include "int8_rows.h"
#include "kernels.h"
#include "vectors.h"

namespace {

constexpr int64_t ELEMENTS_PER_THREAD = 1 << 15;  // fewer are not worth waking another thread for

template <class Body>
void each_row(int64_t rows, int64_t elements, int threads, const Body& body) {
    const bool many = threads > 1 && rows > 1 && elements > 2 * ELEMENTS_PER_THREAD;
#pragma omp parallel for schedule(static) num_threads(threads) if (many)
    for (int64_t row = 0; row < rows; row++) body(row);
}

// x / rms(x) * w. Llama's order: round, then times w. Gemma's (`plus_one`): times (1 + w), then round.
template <class Element>
inline void norm_row(const Element* x, const Element* w, Element* to, int64_t n, float eps, bool plus_one) {
    Vec squares = Vec{};
    each_vector<Element>(n, [&](int64_t i, auto get, auto) {
        const Vec v = get(x + i);
        squares = fma(v, v, squares);
    });
    const Vec scale = splat(1.0f / std::sqrt(sum_lanes(squares) / float(n) + eps));
    each_vector<Element>(n, [&](int64_t i, auto get, auto put) {
        const Vec v = get(x + i) * scale, weight = get(w + i);
        put(to + i, plus_one ? v * (splat(1.0f) + weight) : rounded(v, Element{}) * weight);
    });
}

inline Vec silu(Vec x) {
    const auto negative = x < Vec{};
    const Vec e = exp_nonpositive(negative ? x : -x);
    return x * (negative ? e : splat(1.0f)) / (splat(1.0f) + e);
}

template <class Element>
inline void silu_mul_row(const Element* gate, const Element* up, Element* to, int64_t n) {
    each_vector<Element>(n, [&](int64_t i, auto get, auto put) {
        put(to + i, rounded(silu(get(gate + i)), Element{}) * get(up + i));
    });
}

// x * cos + rotate_half(x) * sin, with halves of `half` elements; x and to may be the same
template <class Element>
inline void rotate(const Element* x, const Element* cos, const Element* sin, Element* to, int64_t half) {
    each_vector<Element>(half, [&](int64_t i, auto get, auto put) {
        const Vec low = get(x + i), high = get(x + half + i);
        const Vec a = rounded(low * get(cos + i), Element{}), b = rounded(high * get(sin + i), Element{});
        const Vec c = rounded(high * get(cos + half + i), Element{}), d = rounded(low * get(sin + half + i), Element{});
        put(to + i, a - b);
        put(to + half + i, c + d);
    });
}

template <class Element, class Kept>
void rotate_and_write(const KvrelayRotary& a) {
    constexpr bool INT8 = sizeof(Kept) == 1;
    const int64_t d = a.dim, width = (a.heads + 2 * a.kv_heads) * d, kept = kept_width<Kept>(d);
    each_row(a.rows, a.rows * width, a.threads, [&](int64_t row) {
        const Element* from = (const Element*)a.qkv + row * width;
        const Element *cos = (const Element*)a.cos + row * d, *sin = (const Element*)a.sin + row * d;
        auto turn = [&](const Element* x, const void* norm, Element* to) {
            if (norm) norm_row(x, (const Element*)norm, to, d, a.eps, a.plus_one);
            rotate(norm ? to : x, cos, sin, to, d / 2);
        };
        for (int64_t h = 0; h < a.heads; h++) turn(from + h * d, a.q_norm, (Element*)a.q + (row * a.heads + h) * d);
        if (row >= a.written) return;
        Kept *k = (Kept*)a.k_pages + a.slots[row] * a.token_stride, *v = (Kept*)a.v_pages + a.slots[row] * a.token_stride;
        const Element *own_k = from + a.heads * d, *own_v = own_k + a.kv_heads * d;
        if constexpr (INT8) {
            static thread_local std::vector<Element> turned;
            turned.resize(d);
            for (int64_t g = 0; g < a.kv_heads; g++) {
                turn(own_k + g * d, a.k_norm, turned.data());
                to_int8(turned.data(), d, k + g * kept);
                to_int8(own_v + g * d, d, v + g * kept);
            }
        } else {
            for (int64_t g = 0; g < a.kv_heads; g++) turn(own_k + g * d, a.k_norm, k + g * d);
            std::memcpy(v, own_v, a.kv_heads * d * sizeof(Element));
        }
    });
}

template <class Element>
void rms_norm(const Element* x, const Element* w, Element* to, int64_t rows, int64_t n, float eps, int plus_one,
              int threads) {
    each_row(rows, rows * n, threads, [&](int64_t row) { norm_row(x + row * n, w, to + row * n, n, eps, plus_one); });
}

template <class Element>
void silu_mul(const Element* gate_up, Element* to, int64_t rows, int64_t n, int threads) {
    each_row(rows, rows * n * 4, threads, [&](int64_t row) {
        silu_mul_row(gate_up + row * 2 * n, gate_up + row * 2 * n + n, to + row * n, n);
    });
}

// sum = x + y, rounded; to = norm of the sum
template <class Element>
void add_norm(const Element* x, const Element* y, const Element* w, Element* sum, Element* to, int64_t rows, int64_t n,
              float eps, int plus_one, int threads) {
    each_row(rows, rows * n * 2, threads, [&](int64_t row) {
        Element* s = sum + row * n;
        each_vector<Element>(n, [&](int64_t i, auto get, auto put) {
            put(s + i, get(x + row * n + i) + get(y + row * n + i));
        });
        norm_row(s, w, to + row * n, n, eps, plus_one);
    });
}

}  // namespace

extern "C" {

void kvrelay_rotate_and_write(const KvrelayRotary* args) {
    if (args->int8) return args->dtype ? rotate_and_write<uint16_t, int8_t>(*args) : rotate_and_write<float, int8_t>(*args);
    args->dtype ? rotate_and_write<uint16_t, uint16_t>(*args) : rotate_and_write<float, float>(*args);
}

void kvrelay_rms_norm(const void* x, const void* w, void* to, int64_t rows, int64_t n, float eps, int32_t plus_one,
                      int32_t dtype, int32_t threads) {
    if (dtype) return rms_norm((const uint16_t*)x, (const uint16_t*)w, (uint16_t*)to, rows, n, eps, plus_one, threads);
    rms_norm((const float*)x, (const float*)w, (float*)to, rows, n, eps, plus_one, threads);
}

void kvrelay_add_norm(const void* x, const void* y, const void* w, void* sum, void* to, int64_t rows, int64_t n, float eps,
                      int32_t plus_one, int32_t dtype, int32_t threads) {
    if (dtype)
        return add_norm((const uint16_t*)x, (const uint16_t*)y, (const uint16_t*)w, (uint16_t*)sum, (uint16_t*)to, rows, n,
                        eps, plus_one, threads);
    add_norm((const float*)x, (const float*)y, (const float*)w, (float*)sum, (float*)to, rows, n, eps, plus_one, threads);
}

// gate_up [rows, 2 * n] -> silu(gate) * up [rows, n]
void kvrelay_silu_mul(const void* gate_up, void* to, int64_t rows, int64_t n, int32_t dtype, int32_t threads) {
    if (dtype) return silu_mul((const uint16_t*)gate_up, (uint16_t*)to, rows, n, threads);
    silu_mul((const float*)gate_up, (float*)to, rows, n, threads);
}
}
