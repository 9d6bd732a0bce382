/* A free list of array memory: memory of NumPy's arrays that compiled programs make, kept for the next array of that size.
 *
 * NumPy asks the handler of the current context for an array's memory, and gives it back to the same handler when the array is
 * deallocated (NEP 49). So a block comes here exactly when it would have gone to `free`: no array, view, frame or exception
 * refers to it. This module installs such a handler in the context of compiled programs, and keeps the freed blocks. NumPy's
 * default handler allocates what is not here.
 *
 * NumPy holds the GIL when it calls a handler, and the GIL guards the list. A call without it leaves the list alone.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

/* NumPy's ABI: ndarraytypes.h and __multiarray_api.h. */
typedef struct {
    void *ctx;
    void *(*malloc)(void *ctx, size_t size);
    void *(*calloc)(void *ctx, size_t count, size_t size);
    void *(*realloc)(void *ctx, void *data, size_t size);
    void (*free)(void *ctx, void *data, size_t size);
} Allocator;

typedef struct {
    char name[127];
    uint8_t version;
    Allocator allocator;
} Handler;

enum { ABI_VERSION = 0, SET_HANDLER = 304, DEFAULT_HANDLER = 306 }; /* places in NumPy's table of functions */
#define ABI 0x02000000u

/* What stands before an array's elements. `size` is last, at the same place before small and large arrays. */
typedef struct Block {
    struct Block *next, *previous; /* in its bucket */
    struct Block *newer, *older;   /* in the order in which they were freed */
    void *allocated;               /* what the default handler returned, or NULL: a small array, without the fields above */
    size_t size;                   /* bytes of the array, rounded up */
} Block;

typedef struct {
    void *allocated;
    size_t size;
} SmallBlock;

#define LEAST 4096 /* smaller arrays lie in pages that malloc keeps */
#define ALIGNMENT 64
#define ROOM (sizeof(Block) + ALIGNMENT) /* bytes before a large array's elements, at most */
#define BUCKETS 4096

static Allocator *numpys;
static PyObject *(*set_handler)(PyObject *);
static PyObject *capsule;

static Block *buckets[BUCKETS], *newest, *oldest;
static size_t kept, blocks, limit;

static Block *
block_of(void *data)
{
    return (Block *)data - 1;
}

static size_t
bucket_of(size_t size)
{
    return (size_t)(((uint64_t)(size / ALIGNMENT) * 0x9E3779B97F4A7C15u) >> 52);
}

static void
take_out(Block *block)
{
    if (block->next != NULL)
        block->next->previous = block->previous;
    *(block->previous != NULL ? &block->previous->next : &buckets[bucket_of(block->size)]) = block->next;
    *(block->newer != NULL ? &block->newer->older : &newest) = block->older;
    *(block->older != NULL ? &block->older->newer : &oldest) = block->newer;
    kept -= block->size;
    blocks--;
}

static void
put_in(Block *block)
{
    Block **first = &buckets[bucket_of(block->size)];
    block->previous = NULL;
    block->next = *first;
    if (*first != NULL)
        (*first)->previous = block;
    *first = block;
    block->newer = NULL;
    block->older = newest;
    *(newest != NULL ? &newest->newer : &oldest) = block;
    newest = block;
    kept += block->size;
    blocks++;
}

static void
give_back(Block *block)
{
    numpys->free(numpys->ctx, block->allocated, block->size + ROOM);
}

/* Give back the blocks that were freed first, until at most `most` bytes are kept. */
static void
shrink(size_t most)
{
    while (kept > most) {
        Block *block = oldest;
        take_out(block);
        give_back(block);
    }
}

static void *
allocate(size_t size, int zeroed)
{
    if (size > PY_SSIZE_T_MAX - 2 * ROOM)
        return NULL;
    if (size < LEAST) {
        size_t bytes = size + sizeof(SmallBlock);
        SmallBlock *block = zeroed ? numpys->calloc(numpys->ctx, bytes, 1) : numpys->malloc(numpys->ctx, bytes);
        if (block == NULL)
            return NULL;
        *block = (SmallBlock){NULL, size};
        return block + 1;
    }
    size = (size + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
    int guarded = PyGILState_Check();
    for (Block *block = guarded ? buckets[bucket_of(size)] : NULL; block != NULL; block = block->next)
        if (block->size == size) {
            take_out(block);
            if (zeroed)
                memset(block + 1, 0, size);
            return block + 1;
        }
    void *allocated = NULL;
    for (int tries = 0; allocated == NULL && tries < 2; tries++) {
        if (tries && guarded)
            shrink(0);
        allocated = zeroed ? numpys->calloc(numpys->ctx, size + ROOM, 1) : numpys->malloc(numpys->ctx, size + ROOM);
    }
    if (allocated == NULL)
        return NULL;
    uintptr_t data = ((uintptr_t)allocated + ROOM) & ~(uintptr_t)(ALIGNMENT - 1);
    Block *block = block_of((void *)data);
    block->allocated = allocated;
    block->size = size;
    return (void *)data;
}

static void *
list_malloc(void *Py_UNUSED(ctx), size_t size)
{
    return allocate(size, 0);
}

static void *
list_calloc(void *Py_UNUSED(ctx), size_t count, size_t size)
{
    if (size && count > PY_SSIZE_T_MAX / size)
        return NULL;
    return allocate(count * size, 1);
}

/* The block has its size. NumPy's `size` comes from the shape, which need not be that of the allocation (an empty array). */
static void
list_free(void *Py_UNUSED(ctx), void *data, size_t Py_UNUSED(size))
{
    if (data == NULL)
        return;
    Block *block = block_of(data);
    if (block->allocated == NULL) {
        SmallBlock *small = (SmallBlock *)data - 1;
        numpys->free(numpys->ctx, small, small->size + sizeof(SmallBlock));
    }
    else if (block->size > limit || !PyGILState_Check())
        give_back(block);
    else {
        shrink(limit - block->size);
        put_in(block);
    }
}

static void *
list_realloc(void *ctx, void *data, size_t size)
{
    void *other = allocate(size, 0);
    if (other != NULL && data != NULL) {
        size_t had = block_of(data)->size;
        memcpy(other, data, had < size ? had : size);
        list_free(ctx, data, had);
    }
    return other;
}

static Handler handler = {"funccoll", 1, {NULL, list_malloc, list_calloc, list_realloc, list_free}};

/* Find NumPy's functions. Return 0 if this NumPy has another ABI, and -1 with an exception. */
static int
find_numpy(void)
{
    PyObject *module = PyImport_ImportModule("numpy._core._multiarray_umath");
    PyObject *table = module != NULL ? PyObject_GetAttrString(module, "_ARRAY_API") : NULL;
    void **functions = table != NULL ? PyCapsule_GetPointer(table, NULL) : NULL;
    int found = functions != NULL ? 0 : -1;
    if (found == 0 && ((unsigned int (*)(void))functions[ABI_VERSION])() == ABI) {
        PyObject *theirs = *(PyObject **)functions[DEFAULT_HANDLER];
        Handler *defaults = PyCapsule_GetPointer(theirs, "mem_handler");
        capsule = defaults != NULL ? PyCapsule_New(&handler, "mem_handler", NULL) : NULL;
        found = capsule != NULL ? 1 : -1;
        if (found > 0) {
            numpys = &defaults->allocator;
            set_handler = (PyObject *(*)(PyObject *))functions[SET_HANDLER];
        }
    }
    Py_XDECREF(table);
    Py_XDECREF(module);
    return found;
}

static PyObject *
use_free_list(PyObject *Py_UNUSED(module), PyObject *most)
{
    size_t bytes = PyLong_AsSize_t(most);
    if (bytes == (size_t)-1 && PyErr_Occurred())
        return NULL;
    int found = capsule != NULL ? 1 : find_numpy();
    if (found < 0)
        return NULL;
    if (found == 0)
        Py_RETURN_FALSE;
    PyObject *before = set_handler(capsule);
    if (before == NULL)
        return NULL;
    Py_DECREF(before);
    limit = bytes;
    shrink(limit);
    Py_RETURN_TRUE;
}

static PyObject *
trim_free_list(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    size_t had = kept;
    if (had) {
        shrink(0);
#ifdef __GLIBC__
        malloc_trim(0); /* pages of freed memory stay with the process until then if used memory lies behind them */
#endif
    }
    return PyLong_FromSize_t(had);
}

static PyObject *
free_list_size(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(args))
{
    return Py_BuildValue("nn", (Py_ssize_t)kept, (Py_ssize_t)blocks);
}

extern PyMethodDef free_list_functions[];

PyMethodDef free_list_functions[] = {
    {"use_free_list", use_free_list, METH_O,
     "use_free_list(limit)\n\nMake arrays of the current context in memory of the free list, which keeps at most `limit` bytes.\n\n"
     "Return False if this NumPy has another ABI."},
    {"trim_free_list", trim_free_list, METH_NOARGS, "trim_free_list()\n\nGive the free list's memory back. Return its bytes."},
    {"free_list_size", free_list_size, METH_NOARGS, "free_list_size()\n\nReturn the bytes and the blocks of the free list."},
    {NULL, NULL, 0, NULL},
};
