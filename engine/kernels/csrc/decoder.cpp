// All layers of a Llama-shaped decoder in one call, in bfloat16, by the kernels that Python calls one at a time where a
// layer is of another kind: the same bits, without Python and its lock between them.

#include <algorithm>
#include <cstring>

#include "kernels.h"

extern "C" {

struct KvrelayNorm {
    const void* weight;
    float eps;
    int32_t plus_one;
};

struct KvrelayLinear {
    const void* panels;  // as in products.cpp
    const float* scales;
    const void* bias;
    int64_t in, out;
    KvrelaySite site;  // of what adapters add to it
};

struct KvrelayLayer {
    KvrelayNorm before, middle;
    KvrelayLinear qkv, out, gate_up, down;
    KvrelayRotary rotary;        // what does not change from step to step
    KvrelayAttention attention;  // the same
};

struct KvrelayStep {
    void* total;    // [rows, width]: of the embedding; overwritten
    void* normed;   // [rows, width]: the result
    void* scratch;  // rows * kvrelay_scratch elements
    const void *cos, *sin;  // [rows, dim]
    const int64_t* slots;   // [written]
    const int32_t *query_starts, *starts, *block_tables;
    int64_t rows, written, sequences, table_stride;
    int32_t threads;
    const KvrelayAdapters* adapters;  // or null
    int32_t (*on_layer)(int32_t);  // or null: told of a layer whose K and V are written; ends the step unless it gives 0
};
}

namespace {

constexpr int32_t BFLOAT16 = 1;
enum Outcome { DONE = 0, NO_MEMORY = 1, STOPPED = 2 };

// A row's parts of the scratch memory, in elements
struct Widths {
    int64_t qkv, q, gate_up;
    explicit Widths(const KvrelayLayer& layer)
        : qkv(layer.qkv.out), q(layer.out.in), gate_up(layer.gate_up.out) {}
    int64_t all() const { return std::max(qkv + 2 * q, gate_up + gate_up / 2); }  // attention is over before the MLP
};

void multiply(const KvrelayLinear& linear, const void* x, void* to, const KvrelayStep& step) {
    kvrelay_product(x, linear.panels, linear.scales, linear.bias, to, step.rows, linear.in, linear.out, step.threads);
    if (step.adapters && linear.site.count)
        kvrelay_adapt(x, to, linear.in, linear.out, &linear.site, step.adapters, BFLOAT16, step.threads);
}

void add_norm(const KvrelayNorm& norm, const void* y, int64_t width, const KvrelayStep& step) {
    kvrelay_add_norm(step.total, y, norm.weight, step.total, step.normed, step.rows, width, norm.eps, norm.plus_one,
                     BFLOAT16, step.threads);
}

// From the normed rows to the attention's output, which takes their place
Outcome attend(const KvrelayLayer& layer, int32_t number, const KvrelayStep& step) {
    const Widths widths(layer);
    uint16_t *qkv = (uint16_t*)step.scratch, *q = qkv + step.rows * widths.qkv, *out = q + step.rows * widths.q;
    multiply(layer.qkv, step.normed, qkv, step);

    KvrelayRotary rotary = layer.rotary;
    rotary.qkv = qkv, rotary.q = q, rotary.cos = step.cos, rotary.sin = step.sin, rotary.slots = step.slots;
    rotary.rows = step.rows, rotary.written = step.written, rotary.threads = step.threads;
    kvrelay_rotate_and_write(&rotary);
    if (step.on_layer && step.on_layer(number)) return STOPPED;

    KvrelayAttention attention = layer.attention;
    attention.q = q, attention.out = out, attention.query_starts = step.query_starts, attention.starts = step.starts;
    attention.block_tables = step.block_tables, attention.table_stride = step.table_stride;
    attention.sequences = step.sequences, attention.threads = step.threads;
    std::memset(out + step.written * widths.q, 0, (step.rows - step.written) * widths.q * sizeof *out);
    if (kvrelay_attend(&attention)) return NO_MEMORY;
    multiply(layer.out, out, step.normed, step);
    return DONE;
}

// From the normed rows to the MLP's output, which takes their place
void feed(const KvrelayLayer& layer, const KvrelayStep& step) {
    const int64_t gate_up = layer.gate_up.out;
    uint16_t *both = (uint16_t*)step.scratch, *hidden = both + step.rows * gate_up;
    multiply(layer.gate_up, step.normed, both, step);
    kvrelay_silu_mul(both, hidden, step.rows, gate_up / 2, BFLOAT16, step.threads);
    multiply(layer.down, hidden, step.normed, step);
}

}  // namespace

extern "C" {

// Elements of scratch memory for each row of a step
int64_t kvrelay_scratch(const KvrelayLayer* layers, int64_t count) {
    int64_t most = 0;
    for (int64_t i = 0; i < count; i++) most = std::max(most, Widths(layers[i]).all());
    return most;
}

int32_t kvrelay_decode(const KvrelayLayer* layers, int64_t count, const KvrelayNorm* last, const KvrelayStep* args) {
    const KvrelayStep& step = *args;
    const KvrelayNorm& first = layers[0].before;
    const int64_t width = layers[0].qkv.in;
    kvrelay_rms_norm(step.total, first.weight, step.normed, step.rows, width, first.eps, first.plus_one, BFLOAT16,
                     step.threads);
    for (int64_t i = 0; i < count; i++) {
        if (const Outcome outcome = attend(layers[i], int32_t(i), step)) return outcome;
        add_norm(layers[i].middle, step.normed, width, step);
        feed(layers[i], step);
        add_norm(i + 1 < count ? layers[i + 1].before : *last, step.normed, width, step);
    }
    return DONE;
}
}
