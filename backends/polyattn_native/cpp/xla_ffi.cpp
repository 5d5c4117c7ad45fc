// Attention as foreign functions of XLA, for JAX's arrays on the CPU.
//
// A call has two attributes: "structure", an argument structure of attention.h without addresses, and "fields", for
// each argument and result the offset of its field in the structure. The last result is the status, one int32.
#include "xla_ffi.h"

#include <stdio.h>
#include <string.h>

#include "attention.h"
#include "system.h"

namespace {

using xla::Error;
using xla::Frame;

Error *failed(const Frame &frame, int32_t code, const char *message) {
    xla::ErrorArguments arguments = {{sizeof(arguments), nullptr}, message, code};
    return frame.api->create_error(&arguments);
}

Error *out_of_memory(const Frame &frame, Status bytes) {
    char message[96];
    snprintf(message, sizeof(message), "there is no memory for a buffer of %lld bytes of the native library",
             static_cast<long long>(bytes));
    return failed(frame, xla::RESOURCE_EXHAUSTED, message);
}

/// Whether XLA only asks for the version; then answer.
bool is_question(const Frame &frame) {
    xla::Extension *extension = frame.header.extensions;
    if (!extension || extension->type != xla::METADATA) return false;
    xla::Version &version = reinterpret_cast<xla::MetadataExtension *>(extension)->metadata->version;
    version.major_version = xla::MAJOR;
    version.minor_version = xla::MINOR;
    return true;
}

/// The number of threads of XLA's pool, at most POLYATTN_NUM_THREADS. Our own threads compute, not those of the pool.
int threads_of(const Frame &frame) {
    int64_t threads = 1;
    xla::ThreadsArguments arguments = {{sizeof(arguments), nullptr}, frame.context, &threads};
    if (Error *error = frame.api->thread_count(&arguments)) {
        xla::ErrorDestroyArguments destroyed = {{sizeof(destroyed), nullptr}, error};
        frame.api->destroy_error(&destroyed);
        threads = 1;
    }
    int limit = environment_number("POLYATTN_NUM_THREADS");
    if (limit > 0 && limit < threads) threads = limit;
    return threads < 1 ? 1 : static_cast<int>(threads);
}

/// A number that XLA computes in float32, or in float64.
double number_in(const xla::Buffer &x) {
    return x.dtype == xla::FLOAT64 ? *static_cast<double *>(x.data) : double(*static_cast<float *>(x.data));
}

/// Set the field at `offset` to an argument or result: its address, except for three small values. Return whether the
/// value is valid.
bool set_field(char *structure, int64_t offset, const xla::Buffer &x) {
    bool is_softcap = offset == offsetof(Attention, softcap);
    if (is_softcap || offset == offsetof(Attention, scale)) {
        double value = number_in(x);
        memcpy(structure + offset, &value, sizeof(value));
        return !is_softcap || value > 0;
    }
    if (offset == offsetof(Attention, seed))
        memcpy(structure + offset, x.data, sizeof(uint32_t) * 2);
    else
        memcpy(structure + offset, &x.data, sizeof(void *));
    return true;
}

int64_t count_of(const xla::Buffer &x) {
    int64_t count = 1;
    for (int64_t axis = 0; axis < x.rank; axis++) count *= x.shape[axis];
    return count;
}

void set_zero(const xla::Buffer &x) {
    memset(x.data, 0, static_cast<size_t>(count_of(x)) * (x.dtype == xla::FLOAT64 ? 8 : 4));
}

/// Prepare and finish what is particular to a structure. The forward has nothing.
void begin(const Attention &, const Frame &) {}
void finish(const Attention &, const Frame &) {}

/// The kernels add to the gradient of a bias.
void begin(const AttentionBackward &call, const Frame &frame) {
    for (int64_t i = 0; i < frame.results.size; i++) {
        const xla::Buffer &x = *frame.results.items[i];
        if (x.data == call.dbias.data || x.data == call.ddistances.data) set_zero(x);
    }
}

/// The gradient of the sinks is computed in float64, which JAX may not have: write each as the sum of two float32.
void finish(const AttentionBackward &call, const Frame &frame) {
    for (int64_t i = 0; i < frame.results.size; i++) {
        const xla::Buffer &x = *frame.results.items[i];
        if (x.data != call.dsinks || x.dtype != xla::FLOAT32) continue;
        for (int64_t item = 0; item < count_of(x) / 2; item++) {
            char *at = static_cast<char *>(x.data) + item * sizeof(double);
            double value;
            memcpy(&value, at, sizeof(value));
            float parts[2] = {static_cast<float>(value), 0};
            parts[1] = static_cast<float>(value - double(parts[0]));
            memcpy(at, parts, sizeof(parts));
        }
    }
}

/// Whether the attributes are those of this version of the structure: a program may have been compiled by another one.
template <class Call> bool is_understood(const Frame &frame) {
    const xla::Attributes &given = frame.attributes;
    if (given.size != 2 || given.types[0] != xla::ARRAY || given.types[1] != xla::ARRAY) return false;
    const xla::Array &fields = *given.items[0], &structure = *given.items[1];
    size_t buffers = static_cast<size_t>(frame.arguments.size + frame.results.size - 1);
    return fields.size == buffers && structure.size * sizeof(int64_t) == sizeof(Call);
}

Attention &forward_of(Attention &call) { return call; }
Attention &forward_of(AttentionBackward &call) { return call.forward; }

template <class Call> Error *handle(const Frame &frame, Status (*run)(const Call *)) {
    if (is_question(frame)) return nullptr;
    if (!is_understood<Call>(frame))
        return failed(frame, xla::INVALID_ARGUMENT, "this program was compiled by another version of polyattn");
    Call call;
    memcpy(&call, frame.attributes.items[1]->data, sizeof(call));
    const int64_t *fields = static_cast<const int64_t *>(frame.attributes.items[0]->data);
    bool valid = true;
    for (int64_t i = 0; i < frame.arguments.size; i++)
        valid &= set_field(reinterpret_cast<char *>(&call), *fields++, *frame.arguments.items[i]);
    for (int64_t i = 0; i < frame.results.size - 1; i++)
        set_field(reinterpret_cast<char *>(&call), *fields++, *frame.results.items[i]);
    forward_of(call).threads = threads_of(frame);
    begin(call, frame);
    Status status = valid ? run(&call) : DOUBT;
    if (status > 0) return out_of_memory(frame, status);
    finish(call, frame);
    *static_cast<int32_t *>(frame.results.items[frame.results.size - 1]->data) = static_cast<int32_t>(status);
    return nullptr;
}

}  // namespace

POLYATTN_EXPORT Status polyattn_attention_forward(const Attention *a);
POLYATTN_EXPORT Status polyattn_attention_backward(const AttentionBackward *call);

POLYATTN_EXPORT void *polyattn_xla_attention_forward(const xla::Frame *frame) {
    return handle<Attention>(*frame, polyattn_attention_forward);
}

POLYATTN_EXPORT void *polyattn_xla_attention_backward(const xla::Frame *frame) {
    return handle<AttentionBackward>(*frame, polyattn_attention_backward);
}
