// The part of XLA's foreign-function interface for C (xla/ffi/api/c_api.h in jaxlib) that a handler on the CPU needs.
//
// XLA keeps the layout of these structures within a major version and only appends fields to them. They are declared
// here with our names, so that the library is built without jaxlib.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace xla {

constexpr int MAJOR = 0, MINOR = 1;  // the oldest version with these structures; a newer XLA accepts it

struct Extension {
    size_t size;
    int32_t type;
    Extension *next;
};

/// The first fields of every structure.
struct Header {
    size_t size;
    Extension *extensions;
};

struct Version {
    Header header;
    int major_version, minor_version;
};

/// With this extension XLA asks for the version instead of calling.
constexpr int32_t METADATA = 1;

struct Metadata {
    size_t size;
    Version version;
};

struct MetadataExtension {
    Extension extension;
    Metadata *metadata;
};

constexpr int32_t FLOAT32 = 11, FLOAT64 = 12;  // codes of dtypes

struct Buffer {
    Header header;
    int32_t dtype;
    void *data;
    int64_t rank;
    int64_t *shape;
};

/// An array among the attributes of a call.
struct Array {
    int32_t dtype;
    size_t size;
    void *data;
};

/// Arguments, results or attributes; those of a handler here are buffers, buffers and arrays.
template <class Item> struct List {
    Header header;
    int64_t size;
    int32_t *types;
    Item **items;
};

struct Attributes {
    Header header;
    int64_t size;
    int32_t *types;
    void **names;  // in alphabetical order
    Array **items;
};
constexpr int32_t ARRAY = 1;  // the type of an attribute

struct Error;
struct Context;

struct ErrorArguments {
    Header header;
    const char *message;
    int32_t code;
};
constexpr int32_t INVALID_ARGUMENT = 3, RESOURCE_EXHAUSTED = 8;

struct ErrorDestroyArguments {
    Header header;
    Error *error;
};

struct ThreadsArguments {
    Header header;
    Context *context;
    int64_t *threads;
};

/// The functions of XLA; those that are not used have no types here.
struct Api {
    Header header;
    Version version;
    const void *internal;
    Error *(*create_error)(ErrorArguments *);
    void (*error_message)();
    void (*destroy_error)(ErrorDestroyArguments *);
    void (*others[9])();
    Error *(*thread_count)(ThreadsArguments *);
};

struct Frame {
    Header header;
    const Api *api;
    Context *context;
    int32_t stage;
    List<Buffer> arguments;
    List<Buffer> results;
    Attributes attributes;
};

}  // namespace xla
