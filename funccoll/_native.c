/* The fast path of calls, for machines with a C compiler: what `compiler/fast_paths.py` and `transports/shm/plan_fast_path.py`
 * do in Python, without an interpreted instruction. Both are tested alike; FUNCCOLL_NATIVE=0 chooses Python.
 *
 *   Dispatch      calls the first of its fast paths that fits the arguments; base of jitted functions
 *   FastPath      one signature: checks arguments, calls the program, makes Arrays of its results
 *   BlockCall     one signature of arrays of NumPy's, without Arrays: `compiler/compile_spmd.py`
 *   PlanFastPath  a collective group: finds unused results, and runs the kernel without the GIL
 *   RaggedCall    a ragged collective: reads a table of sizes, writes a plan's words, and calls its PlanFastPath
 *   ArrayBase     the fields of an Array, and its block as a read-only view
 *
 * `_free_list.c` is part of the module, and has no Python form.
 *
 * What is rare is left to Python: a Dispatch without a fitting fast path calls `fallback`, a PlanFastPath that may not run at
 * once and a BlockCall of other arrays do too, and a PlanFastPath whose kernel returns before it has finished calls `finish`.
 * A RaggedCall leaves tables to Python that may be wrong: Python raises.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <signal.h>
#include <stdint.h>
#include <structmember.h>
#include <unistd.h>

#ifdef Py_GIL_DISABLED
#error "the flags of calls are guarded by the GIL"
#endif

static PyObject *str_fallback, *str_finish, *str_interrupted, *str_is_one_block, *str_is_whole, *str_view,
    *str_find_local, *str_shift;
static PyTypeObject *ndarray_type, *mapping_type;

/* The first fields of NumPy's arrays, which its ABI fixes; `array_fits` tests at import that they are there. */
typedef struct {
    PyObject_HEAD
    char *data;
    int nd;
    Py_ssize_t *dimensions;
    Py_ssize_t *strides;
    PyObject *base;
    PyObject *descr;
    int flags;
} NumpyArray;

#define C_CONTIGUOUS 1
#define ALIGNED 0x100
#define WRITEABLE 0x400

static PyObject *
use_arrays(PyObject *Py_UNUSED(module), PyObject *type)
{
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "use_arrays takes a type");
        return NULL;
    }
    Py_XSETREF(ndarray_type, (PyTypeObject *)Py_NewRef(type));
    Py_RETURN_NONE;
}

static PyObject *
use_mapping(PyObject *Py_UNUSED(module), PyObject *type)
{
    if (!PyType_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "use_mapping takes a type");
        return NULL;
    }
    Py_XSETREF(mapping_type, (PyTypeObject *)Py_NewRef(type));
    Py_RETURN_NONE;
}

static PyObject *
array_fits(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *array, *dtype, *shape;
    unsigned long long address;
    int contiguous;
    if (!PyArg_ParseTuple(args, "OKOO!p:array_fits", &array, &address, &dtype, &PyTuple_Type, &shape, &contiguous))
        return NULL;
    if (Py_TYPE(array)->tp_basicsize < (Py_ssize_t)sizeof(NumpyArray))
        Py_RETURN_FALSE;
    NumpyArray *a = (NumpyArray *)array;
    int fits = a->data == (char *)(uintptr_t)address && a->descr == dtype && a->nd == PyTuple_GET_SIZE(shape)
        && (a->flags & C_CONTIGUOUS) == (contiguous ? C_CONTIGUOUS : 0);
    for (int i = 0; fits && i < a->nd; i++)
        fits = a->dimensions[i] == PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, i));
    return PyErr_Occurred() ? NULL : PyBool_FromLong(fits);
}

/* ---------------------------------------------------------------- read-only views */

/* The bytes from an array's memory to where it is mapped read-only; 0 for memory that no other process sees. -1: an exception. */
static int
find_shift(PyObject *array, Py_ssize_t *shift)
{
    PyObject *base = ((NumpyArray *)array)->base;
    while (base != NULL && Py_IS_TYPE(base, ndarray_type))
        base = ((NumpyArray *)base)->base;
    *shift = 0;
    if (base == NULL || !Py_IS_TYPE(base, mapping_type))
        return 0;
    PyObject *found = PyObject_GetAttr(base, str_shift);
    if (found == NULL)
        return -1;
    *shift = PyLong_AsSsize_t(found);
    Py_DECREF(found);
    return PyErr_Occurred() ? -1 : 0;
}

static void
drop_base(PyObject *capsule)
{
    Py_DECREF((PyObject *)PyCapsule_GetPointer(capsule, NULL));
}

/* See `arrays/shared_mapping.py`. The base of a view that is moved is a capsule: it has no memory that could be written. */
static PyObject *
read_only_view(PyObject *block)
{
    Py_ssize_t shift;
    if (find_shift(block, &shift) < 0)
        return NULL;
    PyObject *made = PyObject_CallMethodNoArgs(block, str_view);
    if (made == NULL || !Py_IS_TYPE(made, ndarray_type))
        return made;
    NumpyArray *view = (NumpyArray *)made;
    view->flags &= ~WRITEABLE;
    if (shift) {
        PyObject *capsule = PyCapsule_New(view->base, NULL, drop_base);
        if (capsule == NULL) {
            Py_DECREF(made);
            return NULL;
        }
        view->base = capsule;
        view->data += shift;
    }
    return made;
}

static PyObject *
read_only(PyObject *Py_UNUSED(module), PyObject *block)
{
    if (!Py_IS_TYPE(block, ndarray_type)) {
        PyErr_SetString(PyExc_TypeError, "read_only takes an array of NumPy's");
        return NULL;
    }
    return read_only_view(block);
}

/* Heaps of this process, the last ones, where they are mapped read-only. */
static struct { uintptr_t start, end; } volatile guarded[8];
static struct sigaction handler_before;

static const char on_write[] =
    "funccoll: this process ends with a segmentation fault, because it wrote into memory of an Array. What arr.local, arr.shards "
    "and np.asarray(arr) have is read-only, also as a tensor (torch.from_dlpack and torch.from_numpy do not see to that): other "
    "ranks may have the same memory. Write into a copy: torch.from_dlpack(arr), which makes one, or arr.local.copy().\n";

/* Say what was wrong, and leave the rest to the handler before this one: the instruction is executed again, a signal that was
 * sent is sent again. */
static void
on_fault(int number, siginfo_t *info, void *Py_UNUSED(context))
{
    uintptr_t address = (uintptr_t)info->si_addr;
    for (size_t i = 0; info->si_code == SEGV_ACCERR && i < sizeof(guarded) / sizeof(*guarded); i++)
        if (address >= guarded[i].start && address < guarded[i].end) {
            ssize_t written = write(STDERR_FILENO, on_write, sizeof(on_write) - 1);
            (void)written;
            break;
        }
    sigaction(number, &handler_before, NULL);
    if (info->si_code <= 0)
        raise(number);
}

static PyObject *
guard_memory(PyObject *Py_UNUSED(module), PyObject *args)
{
    static unsigned count;
    unsigned long long start, nbytes;
    if (!PyArg_ParseTuple(args, "KK:guard_memory", &start, &nbytes))
        return NULL;
    unsigned place = count++ % (sizeof(guarded) / sizeof(*guarded));
    guarded[place].start = (uintptr_t)start;
    guarded[place].end = (uintptr_t)(start + nbytes);
    if (count == 1) {
        struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK};
        sigemptyset(&action.sa_mask);
        if (sigaction(SIGSEGV, &action, &handler_before) < 0)
            return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------- PlanFastPath */

/* Words of a kernel context: kernels/kernel_context.py. */
typedef struct { int arguments, results, status; } ContextWords;

typedef struct {
    PyObject_HEAD
    PyObject *kernel;      /* a builtin function: runs the plan without the GIL */
    int64_t *context;
    ContextWords word;
    int64_t *owner;        /* the thread that may call it */
    PyObject *busy;        /* bytearray: by communicator, 1 while one of its calls runs */
    Py_ssize_t ncommunicators, nargs, nresults;
    Py_ssize_t *communicators;
    PyObject *kept;        /* list of tuples of results, one for a call */
    PyObject *others;      /* makes such a tuple */
    char is_fast;         /* 0 where the kernel is another one: while a profile is recorded */
    char is_complete;      /* 1 when the last call has done everything that others wait for */
} PlanFastPath;

static PyTypeObject PlanFastPathType;

static PyObject *
plan_fast_path_bind(PlanFastPath *self, PyObject *args)
{
    unsigned long long context, owner;
    PyObject *kernel, *busy, *communicators, *kept, *others;
    ContextWords word;
    Py_ssize_t nargs, nresults;
    if (!PyArg_ParseTuple(args, "OK(iii)KO!O!O!Onn:bind", &kernel, &context, &word.arguments, &word.results, &word.status,
                          &owner, &PyByteArray_Type, &busy, &PyTuple_Type, &communicators, &PyList_Type, &kept, &others,
                          &nargs, &nresults))
        return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(communicators);
    Py_ssize_t *numbers = PyMem_Calloc(n ? n : 1, sizeof(Py_ssize_t));
    if (numbers == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        numbers[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(communicators, i));
        if (PyErr_Occurred() || numbers[i] < 0 || numbers[i] >= PyByteArray_GET_SIZE(busy)) {
            PyMem_Free(numbers);
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "a communicator without a flag");
            return NULL;
        }
    }
    PyMem_Free(self->communicators);
    self->communicators = numbers;
    self->ncommunicators = n;
    self->context = (int64_t *)(uintptr_t)context;
    self->owner = (int64_t *)(uintptr_t)owner;
    self->word = word;
    self->nargs = nargs;
    self->nresults = nresults;
    Py_XSETREF(self->kernel, Py_NewRef(kernel));
    Py_XSETREF(self->busy, Py_NewRef(busy));
    Py_XSETREF(self->kept, Py_NewRef(kept));
    Py_XSETREF(self->others, Py_NewRef(others));
    self->is_fast = 1;
    Py_RETURN_NONE;
}

static int
is_unused(PyObject *results, Py_ssize_t count)
{
    if (!PyTuple_CheckExact(results) || PyTuple_GET_SIZE(results) != count)
        return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (Py_REFCNT(PyTuple_GET_ITEM(results, i)) != 1)
            return 0;
    return 1;
}

/* Arrays for the results of one call: a kept tuple whose arrays only it refers to, else others. */
static PyObject *
unused_results(PlanFastPath *self)
{
    for (Py_ssize_t i = PyList_GET_SIZE(self->kept); i-- > 0;) {
        PyObject *results = PyList_GET_ITEM(self->kept, i);
        if (is_unused(results, self->nresults))
            return Py_NewRef(results);
    }
    PyObject *results = PyObject_CallNoArgs(self->others);
    if (results != NULL && (!PyTuple_CheckExact(results) || PyTuple_GET_SIZE(results) != self->nresults)) {
        PyErr_SetString(PyExc_TypeError, "results of a call are a tuple of arrays");
        Py_CLEAR(results);
    }
    return results;
}

static void
set_busy(PlanFastPath *self, char value)
{
    char *busy = PyByteArray_AS_STRING(self->busy);
    for (Py_ssize_t i = 0; i < self->ncommunicators; i++)
        busy[self->communicators[i]] = value;
}

#define BEFORE_IT_BEGAN (-2)

/* 1: `results` are the call's, still those of the pool, and each held once more, so that a call from a finalizer cannot take
 * them: `let_go` drops them. 0: nothing was done, and `fallback` must do it. -1, BEFORE_IT_BEGAN: an exception. */
static int
plan_fast_path_run(PlanFastPath *self, PyObject *const *arrays, Py_ssize_t count, PyObject **results)
{
    if (!self->is_fast || self->kernel == NULL || count != self->nargs
        || *self->owner != (int64_t)PyThread_get_thread_ident())
        return 0;
    for (Py_ssize_t i = 0; i < self->ncommunicators; i++)
        if (PyByteArray_AS_STRING(self->busy)[self->communicators[i]])
            return 0;
    self->is_complete = 0;  /* not before: another thread's call may have just ended, and this one is refused */
    set_busy(self, 1);
    PyObject *found = unused_results(self);
    if (found == NULL) {
        set_busy(self, 0);
        return BEFORE_IT_BEGAN;
    }
    self->context[self->word.arguments] = (int64_t)(intptr_t)arrays;
    self->context[self->word.results] = (int64_t)(intptr_t)((PyTupleObject *)found)->ob_item;
    PyObject *status = PyObject_CallNoArgs(self->kernel);  /* the builtin raises nothing */
    Py_XDECREF(status);
    int interrupted = status == NULL || PyErr_CheckSignals() < 0;
    if (interrupted || self->context[self->word.status] != 0) {
        PyObject *type = NULL, *value = NULL, *traceback = NULL, *given = PyTuple_New(count), *finished = NULL;
        if (interrupted) {
            PyErr_Fetch(&type, &value, &traceback);
            PyErr_NormalizeException(&type, &value, &traceback);
        }
        for (Py_ssize_t i = 0; given != NULL && i < count; i++)
            PyTuple_SET_ITEM(given, i, Py_NewRef(arrays[i]));
        if (given != NULL) {
            PyObject *name = interrupted ? str_interrupted : str_finish;
            finished = PyObject_CallMethodObjArgs((PyObject *)self, name, given, found, value, NULL);
        }
        Py_XDECREF(given);
        if (interrupted) {
            Py_CLEAR(finished);
            if (!PyErr_Occurred())
                PyErr_Restore(type, value, traceback);
            else {
                Py_XDECREF(type);
                Py_XDECREF(value);
                Py_XDECREF(traceback);
            }
        }
        if (finished != NULL && !PyTuple_CheckExact(finished)) {
            PyErr_SetString(PyExc_TypeError, "results of a call are a tuple of arrays");
            Py_CLEAR(finished);
        }
        Py_SETREF(found, finished);
    }
    for (Py_ssize_t i = 0; found != NULL && i < PyTuple_GET_SIZE(found); i++)
        Py_INCREF(PyTuple_GET_ITEM(found, i));
    set_busy(self, 0);
    *results = found;
    self->is_complete |= found != NULL;  /* `interrupted` says what a call is that an exception leaves */
    return found == NULL ? -1 : 1;
}

static void
let_go(PyObject *results)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(results); i++)
        Py_DECREF(PyTuple_GET_ITEM(results, i));
    Py_DECREF(results);
}

/* A new tuple of results: the pool must see that its arrays are in use. */
static PyObject *
copy_of(PyObject *results)
{
    PyObject *copy = PyTuple_New(PyTuple_GET_SIZE(results));
    for (Py_ssize_t i = 0; copy != NULL && i < PyTuple_GET_SIZE(results); i++)
        PyTuple_SET_ITEM(copy, i, Py_NewRef(PyTuple_GET_ITEM(results, i)));
    return copy;
}

static PyObject *
plan_fast_path_call(PlanFastPath *self, PyObject *args, PyObject *kwargs)
{
    PyObject *results;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "a collective group takes no keywords");
        return NULL;
    }
    int done = plan_fast_path_run(self, ((PyTupleObject *)args)->ob_item, PyTuple_GET_SIZE(args), &results);
    if (done < 0)
        return NULL;
    if (!done)
        return PyObject_CallMethodOneArg((PyObject *)self, str_fallback, args);
    PyObject *copy = copy_of(results);
    let_go(results);
    return copy;
}

static int
plan_fast_path_traverse(PlanFastPath *self, visitproc visit, void *arg)
{
    Py_VISIT(self->kernel);
    Py_VISIT(self->busy);
    Py_VISIT(self->kept);
    Py_VISIT(self->others);
    return 0;
}

static int
plan_fast_path_clear(PlanFastPath *self)
{
    self->is_fast = 0;
    Py_CLEAR(self->kernel);
    Py_CLEAR(self->kept);
    Py_CLEAR(self->others);
    return 0;
}

static void
plan_fast_path_dealloc(PlanFastPath *self)
{
    PyObject_GC_UnTrack(self);
    plan_fast_path_clear(self);
    Py_CLEAR(self->busy);
    PyMem_Free(self->communicators);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef plan_fast_path_methods[] = {
    {"bind", (PyCFunction)plan_fast_path_bind, METH_VARARGS,
     "bind(kernel, context, words, owner, busy, communicators, kept, others, nargs, nresults)\n\n"
     "Set what a call uses. Context and owner are addresses, whose memory must live as long as this object."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef plan_fast_path_members[] = {
    {"is_fast", T_BOOL, offsetof(PlanFastPath, is_fast), 0, "False where calls go through `fallback`."},
    {"is_complete", T_BOOL, offsetof(PlanFastPath, is_complete), 0, "True when the last call has done all that others wait for."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject PlanFastPathType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "funccoll._native.PlanFastPath",
    .tp_doc = "The fast path of a collective group: from this rank's arrays to a tuple of its results.",
    .tp_basicsize = sizeof(PlanFastPath),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)plan_fast_path_dealloc,
    .tp_traverse = (traverseproc)plan_fast_path_traverse,
    .tp_clear = (inquiry)plan_fast_path_clear,
    .tp_call = (ternaryfunc)plan_fast_path_call,
    .tp_methods = plan_fast_path_methods,
    .tp_members = plan_fast_path_members,
};

/* ---------------------------------------------------------------- RaggedCall */

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* How a table of sizes is read: the functions of collectives/pair_blocks.py in the order of its READINGS. */
enum { IN_ORDER, OF_SOURCES, OF_RESULTS, AS_STATED };

#define MOST_ROWS ((int64_t)1 << 40)  /* sums of as many sizes as there are ranks do not overflow */

/* Words of a call's state: transports/shm/ragged_call.py. The gaps follow, as (first row, row behind the last), then the table. */
enum { IS_WRITTEN, GAPS, STATE_HEAD };

typedef struct {
    PyObject_HEAD
    PlanFastPath *moves;
    int64_t *state;
    const int64_t *offsets, *lengths;  /* rows of (address, begin, within) and (address, size, within, most, unit) */
    Py_ssize_t noffsets, nlengths;
    Py_ssize_t p, rank, rows, result_rows, row_bytes, table_words;
    int reading, combines, exceeds_caches;
    int64_t *blocks;                   /* starts, places and sizes, each by (source, destination); then room for a table */
} RaggedCall;

static PyTypeObject RaggedCallType;

static PyObject *
ragged_call_bind(RaggedCall *self, PyObject *args)
{
    unsigned long long state, offsets, lengths;
    PyObject *moves;
    if (!PyArg_ParseTuple(args, "O!KKnKn(nnnnnn)iii:bind", &PlanFastPathType, &moves, &state, &offsets, &self->noffsets,
                          &lengths, &self->nlengths, &self->p, &self->rank, &self->rows, &self->result_rows,
                          &self->row_bytes, &self->table_words, &self->reading, &self->combines, &self->exceeds_caches))
        return NULL;
    int64_t *blocks = PyMem_Calloc(3 * self->p * self->p + self->table_words, sizeof(int64_t));
    if (blocks == NULL)
        return PyErr_NoMemory();
    PyMem_Free(self->blocks);
    self->blocks = blocks;
    self->state = (int64_t *)(uintptr_t)state;
    self->offsets = (const int64_t *)(uintptr_t)offsets;
    self->lengths = (const int64_t *)(uintptr_t)lengths;
    Py_XSETREF(self->moves, (PlanFastPath *)Py_NewRef(moves));
    Py_RETURN_NONE;
}

/* Find the blocks of a table. 0: it may be wrong. */
static int
read_table(RaggedCall *self, const int64_t *table)
{
    const Py_ssize_t p = self->p;
    int64_t *starts = self->blocks, *places = starts + p * p, *sizes = places + p * p;
    for (Py_ssize_t i = 0; i < self->table_words; i++)
        if (table[i] < 0 || table[i] > MOST_ROWS)
            return 0;
    if (self->reading == OF_RESULTS)
        for (Py_ssize_t i = p; i < self->table_words; i++)
            if (table[i] != table[i % p])
                return 0;
    for (Py_ssize_t s = 0; s < p; s++)
        for (Py_ssize_t d = 0; d < p; d++) {
            Py_ssize_t i = s * p + d;
            switch (self->reading) {
            case IN_ORDER:
                sizes[i] = table[i];
                starts[i] = d ? starts[i - 1] + sizes[i - 1] : 0;
                places[i] = s ? places[i - p] + sizes[i - p] : 0;
                break;
            case OF_SOURCES:
                sizes[i] = table[s];
                starts[i] = 0;
                places[i] = s ? places[i - p] + sizes[i - p] : 0;
                break;
            case OF_RESULTS:
                sizes[i] = table[d];
                starts[i] = d ? starts[i - 1] + sizes[i - 1] : 0;
                places[i] = 0;
                break;
            default:
                starts[i] = table[(4 * s + 0) * p + d];
                sizes[i] = table[(4 * s + 1) * p + d];
                places[i] = table[(4 * s + 2) * p + d];
                if (sizes[i] != table[(4 * d + 3) * p + s])
                    return 0;
            }
            if (starts[i] + sizes[i] > self->rows || places[i] + sizes[i] > self->result_rows)
                return 0;
            if (!self->combines && s && places[i] < places[i - p] + sizes[i - p])
                return 0;  /* not in the order of ranks: Python looks whether they overlap */
        }
    return 1;
}

static int
ragged_call_write(RaggedCall *self, const int64_t *table)
{
    const Py_ssize_t p = self->p;
    const int64_t *values = self->blocks, *places = values + p * p, *sizes = places + p * p;
    int64_t *state = self->state, *gaps = state + STATE_HEAD, ngaps = 0, end = 0;
    state[IS_WRITTEN] = 0;
    if (!read_table(self, table))
        return 0;
    for (const int64_t *row = self->offsets, *last = row + 3 * self->noffsets; row < last; row += 3)
        *(int64_t *)(uintptr_t)row[0] = values[row[1]] * self->row_bytes + row[2];
    for (const int64_t *row = self->lengths, *last = row + 5 * self->nlengths; row < last; row += 5) {
        int64_t length = values[row[1]] * self->row_bytes - row[2];
        length = length < 0 ? 0 : length > row[3] ? row[3] : length;
        *(int64_t *)(uintptr_t)row[0] = length / row[4];
    }
    for (Py_ssize_t i = self->rank; i < p * p; i += p)
        if (sizes[i]) {
            if (places[i] > end) {
                gaps[2 * ngaps] = end;
                gaps[2 * ngaps++ + 1] = places[i];
            }
            if (places[i] + sizes[i] > end)
                end = places[i] + sizes[i];
        }
    if (end < self->result_rows) {
        gaps[2 * ngaps] = end;
        gaps[2 * ngaps++ + 1] = self->result_rows;
    }
    state[GAPS] = ngaps;
    memcpy(gaps + 2 * (p + 1), table, self->table_words * sizeof(int64_t));
    state[IS_WRITTEN] = 1;
    return 1;
}

/* Set bytes to 0, past the caches if `streams`: nobody reads them soon, and what is there need not be read first. */
static void
clear_bytes(char *at, size_t nbytes, int streams)
{
#if defined(__SSE2__)
    if (streams && nbytes >= 4096) {
        size_t head = -(uintptr_t)at & 63, lines = (nbytes - head) / 64;
        const __m128i zero = _mm_setzero_si128();
        memset(at, 0, head);
        at += head;
        for (size_t i = 0; i < lines; i++, at += 64)
            for (int j = 0; j < 4; j++)
                _mm_stream_si128((__m128i *)at + j, zero);
        _mm_sfence();
        nbytes -= head + 64 * lines;
    }
#endif
    memset(at, 0, nbytes);
}

#define LONG_BYTES ((Py_ssize_t)1 << 20)  /* so many take so long that other threads get the GIL meanwhile */

static void
clear_gaps(RaggedCall *self, char *result)
{
    const int64_t *gaps = self->state + STATE_HEAD;
    Py_ssize_t rows = 0;
    for (int64_t i = 0; i < self->state[GAPS]; i++)
        rows += gaps[2 * i + 1] - gaps[2 * i];
    PyThreadState *others = rows * self->row_bytes >= LONG_BYTES ? PyEval_SaveThread() : NULL;
    for (int64_t i = 0; i < self->state[GAPS]; i++)
        clear_bytes(result + gaps[2 * i] * self->row_bytes, (gaps[2 * i + 1] - gaps[2 * i]) * self->row_bytes,
                    self->exceeds_caches);
    if (others != NULL)
        PyEval_RestoreThread(others);
}

/* The words of a table, in order; NULL where an array is another one than the program makes. */
static const int64_t *
words_of(RaggedCall *self, PyObject *given)
{
    NumpyArray *a = (NumpyArray *)given;
    Py_ssize_t words = 1;
    if (!Py_IS_TYPE(given, ndarray_type) || !(a->flags & ALIGNED) || a->nd > 3)
        return NULL;
    for (int i = 0; i < a->nd; i++)
        words *= a->dimensions[i];
    if (words != self->table_words)
        return NULL;
    if (a->flags & C_CONTIGUOUS)
        return (const int64_t *)a->data;
    int64_t *copy = self->blocks + 3 * self->p * self->p;
    Py_ssize_t n[3] = {1, 1, 1}, step[3] = {0, 0, 0}, at = 0;
    for (int i = 0, d = 3 - a->nd; i < a->nd; i++, d++) {
        n[d] = a->dimensions[i];
        step[d] = a->strides[i];
    }
    for (Py_ssize_t i = 0; i < n[0]; i++)
        for (Py_ssize_t j = 0; j < n[1]; j++)
            for (Py_ssize_t k = 0; k < n[2]; k++)
                copy[at++] = *(const int64_t *)(a->data + i * step[0] + j * step[1] + k * step[2]);
    return copy;
}

static PyObject *
ragged_call_call(RaggedCall *self, PyObject *args, PyObject *kwargs)
{
    PyObject *results, *const *given = ((PyTupleObject *)args)->ob_item;
    PlanFastPath *moves = self->moves;
    int good = moves != NULL && moves->is_fast && PyTuple_GET_SIZE(args) == 2
        && *moves->owner == (int64_t)PyThread_get_thread_ident();
    for (Py_ssize_t i = 0; good && i < moves->ncommunicators; i++)
        good = !PyByteArray_AS_STRING(moves->busy)[moves->communicators[i]];
    const int64_t *table = good ? words_of(self, given[1]) : NULL;
    if ((good = table != NULL)) {
        const int64_t *written = self->state + STATE_HEAD + 2 * (self->p + 1);
        moves->is_complete = 0;  /* a wrong table raises before the call begins */
        good = (self->state[IS_WRITTEN] && !memcmp(table, written, self->table_words * sizeof(int64_t)))
            || ragged_call_write(self, table);
    }
    int done = good ? plan_fast_path_run(moves, given, 1, &results) : 0;
    if (done < 0)
        return NULL;
    if (!done)
        return PyObject_CallMethodOneArg((PyObject *)self, str_fallback, args);
    PyObject *copy = copy_of(results);
    if (copy != NULL && self->state[GAPS])
        clear_gaps(self, ((NumpyArray *)PyTuple_GET_ITEM(copy, 0))->data);
    let_go(results);
    return copy;
}

static int
ragged_call_traverse(RaggedCall *self, visitproc visit, void *arg)
{
    Py_VISIT(self->moves);
    return 0;
}

static int
ragged_call_clear(RaggedCall *self)
{
    Py_CLEAR(self->moves);
    return 0;
}

static void
ragged_call_dealloc(RaggedCall *self)
{
    PyObject_GC_UnTrack(self);
    ragged_call_clear(self);
    PyMem_Free(self->blocks);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef ragged_call_methods[] = {
    {"bind", (PyCFunction)ragged_call_bind, METH_VARARGS,
     "bind(moves, state, offsets, noffsets, lengths, nlengths, (p, rank, rows, result_rows, row_bytes, table_words), reading, "
     "combines, exceeds_caches)\n\n"
     "Set what a call uses. State, offsets and lengths are addresses, whose memory must live as long as this object."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject RaggedCallType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "funccoll._native.RaggedCall",
    .tp_doc = "A ragged collective: from this rank's operand and a table of sizes to a tuple of its result.",
    .tp_basicsize = sizeof(RaggedCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)ragged_call_dealloc,
    .tp_traverse = (traverseproc)ragged_call_traverse,
    .tp_clear = (inquiry)ragged_call_clear,
    .tp_call = (ternaryfunc)ragged_call_call,
    .tp_methods = ragged_call_methods,
};

/* ---------------------------------------------------------------- FastPath */

typedef struct {
    PyObject *layout;     /* of an Array; NULL for an array of NumPy's */
    PyObject *descr;      /* of an array of NumPy's, with its shape */
    int nd;
    Py_ssize_t *shape;
    PyObject *index;      /* of this process's block in it; NULL for the whole, or several blocks */
    Py_ssize_t itemsize;
    PyObject *arrange;    /* makes the copies of one that cannot be taken as it is, of what `index` leaves */
    int is_block;         /* 0 where several devices take a block each */
} Expected;

typedef struct {
    PyObject_HEAD
    Py_ssize_t nargs, nouts;
    Expected *expected;
    PyTypeObject *array_type;
    Py_ssize_t layout_at, copies_at; /* where an Array has its fields */
    PyObject *run;
    int is_group;         /* 1 where `run` is a PlanFastPath */
    PyObject *out_layouts;
    PyObject *unflatten;  /* NULL where the result is one Array */
    PyObject *failed;     /* takes note of an exception */
} FastPath;

static PyTypeObject FastPathType;

#define FIELD(object, at) (*(PyObject **)((char *)(object) + (at)))

static Py_ssize_t
slot_of(PyObject *type, const char *name)
{
    PyObject *found = PyObject_GetAttrString(type, name);
    if (found == NULL)
        return -1;
    Py_ssize_t at = -1;
    if (Py_IS_TYPE(found, &PyMemberDescr_Type))
        at = ((PyMemberDescrObject *)found)->d_member->offset;
    else
        PyErr_Format(PyExc_TypeError, "%s is not a slot", name);
    Py_DECREF(found);
    return at;
}

static int
set_type(Expected *e, PyObject *descr, PyObject *shape)
{
    e->nd = (int)PyTuple_GET_SIZE(shape);
    e->shape = PyMem_Calloc(e->nd ? e->nd : 1, sizeof(Py_ssize_t));
    if (e->shape == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < e->nd; i++)
        e->shape[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, i));
    e->descr = Py_NewRef(descr);
    return PyErr_Occurred() ? -1 : 0;
}

static int
expect(Expected *e, PyObject *item)
{
    if (!PyTuple_CheckExact(item)) {
        e->layout = Py_NewRef(item);
        return 0;
    }
    PyObject *descr, *shape, *index, *arrange;
    if (!PyArg_ParseTuple(item, "OO!pOO:expected", &descr, &PyTuple_Type, &shape, &e->is_block, &index, &arrange))
        return -1;
    if (set_type(e, descr, shape) < 0)
        return -1;
    e->index = index == Py_None ? NULL : Py_NewRef(index);
    e->arrange = Py_NewRef(arrange);
    PyObject *itemsize = PyObject_GetAttrString(descr, "itemsize");
    if (itemsize != NULL) {
        e->itemsize = PyLong_AsSsize_t(itemsize);
        Py_DECREF(itemsize);
    }
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *
fast_path_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *expected, *array_type, *run, *out_layouts, *unflatten, *failed;
    if (!PyArg_ParseTuple(args, "O!O!OO!OO:FastPath", &PyTuple_Type, &expected, &PyType_Type, &array_type, &run,
                          &PyTuple_Type, &out_layouts, &unflatten, &failed))
        return NULL;
    FastPath *self = (FastPath *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(expected);
    self->expected = PyMem_Calloc(n ? n : 1, sizeof(Expected));
    if (self->expected == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->nargs = n;
    self->nouts = PyTuple_GET_SIZE(out_layouts);
    self->array_type = (PyTypeObject *)Py_NewRef(array_type);
    self->run = Py_NewRef(run);
    self->is_group = PyObject_TypeCheck(run, &PlanFastPathType);
    self->out_layouts = Py_NewRef(out_layouts);
    self->unflatten = unflatten == Py_None ? NULL : Py_NewRef(unflatten);
    self->failed = Py_NewRef(failed);
    self->layout_at = slot_of(array_type, "layout");
    self->copies_at = slot_of(array_type, "_copies");
    int bad = self->layout_at < 0 || self->copies_at < 0;
    for (Py_ssize_t i = 0; !bad && i < n; i++)
        bad = expect(&self->expected[i], PyTuple_GET_ITEM(expected, i)) < 0;
    if (!bad && unflatten == Py_None && self->nouts != 1) {
        PyErr_SetString(PyExc_ValueError, "several results need `unflatten`");
        bad = 1;
    }
    if (bad)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static int
is_expected(const Expected *e, PyObject *array)
{
    if (!Py_IS_TYPE(array, ndarray_type))
        return 0;
    NumpyArray *a = (NumpyArray *)array;
    if (a->descr != e->descr || a->nd != e->nd)
        return 0;
    for (int k = 0; k < e->nd; k++)
        if (a->dimensions[k] != e->shape[k])
            return 0;
    return 1;
}

static int
fits(FastPath *self, PyObject *const *leaves, Py_ssize_t count)
{
    if (count != self->nargs)
        return 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const Expected *e = &self->expected[i];
        PyObject *leaf = leaves[i];
        if (e->layout != NULL) {
            if (!Py_IS_TYPE(leaf, self->array_type) || FIELD(leaf, self->layout_at) != e->layout)
                return 0;
            PyObject *copies = FIELD(leaf, self->copies_at);
            if (copies == NULL || copies == Py_None)
                return 0;
        } else if (!is_expected(e, leaf))
            return 0;
    }
    return 1;
}

/* Replace arrays of NumPy's by what the program takes, as far as no other code runs. 0: one is not as expected any more.
 *
 * Other threads may change an array in the middle of a call. With a weak reference to it none can resize it: NumPy refuses that.
 * One may give it another shape, which does not matter to the kernel; compute gets a view, whose shape stays. */
static int
guard(FastPath *self, PyObject **given, PyObject **guards)
{
    for (Py_ssize_t i = 0; i < self->nargs; i++)
        if (self->expected[i].layout == NULL && (guards[i] = PyWeakref_NewRef(given[i], NULL)) == NULL)
            return -1;  /* finalizers may have run, here and before */
    for (Py_ssize_t i = 0; i < self->nargs; i++) {
        const Expected *e = &self->expected[i];
        if (e->layout != NULL)
            continue;
        if (!is_expected(e, given[i]))
            return 0;
        PyObject *index = e->is_block && e->index != NULL ? e->index : e->is_block && self->is_group ? NULL : Py_Ellipsis;
        if (index != NULL) {
            Py_SETREF(given[i], PyObject_GetItem(given[i], index));
            if (given[i] == NULL)
                return -1;
        }
    }
    return 1;
}

/* True for an array that lies as a new one does: see core/array_order.py. */
static int
is_in_c_order(const NumpyArray *a, Py_ssize_t stride)
{
    if ((a->flags & (C_CONTIGUOUS | ALIGNED)) != (C_CONTIGUOUS | ALIGNED))
        return 0;
    for (int k = a->nd - 1; k >= 0; stride *= a->dimensions[k--])
        if (a->strides[k] != stride)
            return 0;
    return 1;
}

/* An array in C order, or those of several devices, in the place of what `guard` has left. */
static PyObject *
copies_of(const Expected *e, PyObject *array)
{
    if (e->is_block && is_in_c_order((NumpyArray *)array, e->itemsize))
        return array;
    PyObject *copies = PyObject_CallOneArg(e->arrange, array);
    Py_DECREF(array);
    return copies;
}

static PyObject *
wrap(FastPath *self, PyObject *copies, Py_ssize_t i)
{
    PyObject *array = self->array_type->tp_alloc(self->array_type, 0);
    if (array != NULL) {
        FIELD(array, self->layout_at) = Py_NewRef(PyTuple_GET_ITEM(self->out_layouts, i));
        FIELD(array, self->copies_at) = Py_NewRef(copies);
    }
    return array;
}

static PyObject *
wrap_all(FastPath *self, PyObject *outs)
{
    if (!PyTuple_Check(outs) || PyTuple_GET_SIZE(outs) != self->nouts) {
        PyErr_SetString(PyExc_TypeError, "a program returns a tuple of the copies of its results");
        return NULL;
    }
    if (self->unflatten == NULL)
        return wrap(self, PyTuple_GET_ITEM(outs, 0), 0);
    PyObject *made = PyList_New(self->nouts);
    for (Py_ssize_t i = 0; made != NULL && i < self->nouts; i++) {
        PyObject *array = wrap(self, PyTuple_GET_ITEM(outs, i), i);
        if (array == NULL)
            Py_CLEAR(made);
        else
            PyList_SET_ITEM(made, i, array);
    }
    if (made == NULL)
        return NULL;
    PyObject *result = PyObject_CallOneArg(self->unflatten, made);
    Py_DECREF(made);
    return result;
}

/* Tell `failed` of the exception that leaves the call, which it still does then, or another one in which it is the context. */
static void
note_exception(PyObject *failed)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(value, traceback);
    PyObject *noted = PyObject_CallOneArg(failed, value);
    if (noted != NULL) {
        Py_DECREF(noted);
        Py_XDECREF(traceback);
        PyErr_Restore(type, value, PyException_GetTraceback(value));  /* `failed` may have cut frames out of it */
        return;
    }
    PyObject *second_type, *second, *second_traceback;
    PyErr_Fetch(&second_type, &second, &second_traceback);
    PyErr_NormalizeException(&second_type, &second, &second_traceback);
    if (second != value)
        PyException_SetContext(second, Py_NewRef(value));
    PyErr_Restore(second_type, second, second_traceback);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
}

#define FEW 16

/* The result for leaves that fit; NotImplemented where they do not any more. */
static PyObject *
fast_path_run(FastPath *self, PyObject *const *leaves)
{
    Py_ssize_t n = self->nargs;
    PyObject *few[2 * FEW] = {NULL}, **given = few, *outs = NULL, *result = NULL;
    if (n > FEW && (given = PyMem_Calloc(2 * n, sizeof(PyObject *))) == NULL)
        return PyErr_NoMemory();
    PyObject **guards = given + n;
    for (Py_ssize_t i = 0; i < n; i++)  /* all at once: from here on other code may run, and change the leaves */
        given[i] = Py_NewRef(self->expected[i].layout == NULL ? leaves[i] : FIELD(leaves[i], self->copies_at));
    int good = guard(self, given, guards);
    if (good == 0)
        result = Py_NewRef(Py_NotImplemented);
    for (Py_ssize_t i = 0; good > 0 && i < n; i++)
        if (self->expected[i].layout == NULL && (given[i] = copies_of(&self->expected[i], given[i])) == NULL)
            good = -1;
    if (good > 0) {
        int done = self->is_group ? plan_fast_path_run((PlanFastPath *)self->run, given, n, &outs) : 0;
        int held = done > 0;
        if (done == 0)
            outs = PyObject_Vectorcall(self->run, given, n, NULL);
        if (outs != NULL)
            result = wrap_all(self, outs);
        if (result == NULL && done != BEFORE_IT_BEGAN)
            note_exception(self->failed);
        if (held && outs != NULL)
            let_go(outs);
        else
            Py_XDECREF(outs);
    }
    for (Py_ssize_t i = 0; i < 2 * n; i++)
        Py_XDECREF(given[i]);
    if (given != few)
        PyMem_Free(given);
    return result;
}

static PyObject *
fast_path_call(FastPath *self, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *leaves, *result = NULL;
    if (!PyArg_ParseTuple(args, "O:FastPath", &leaves) || (leaves = PySequence_Fast(leaves, "a sequence of arrays")) == NULL)
        return NULL;
    if (fits(self, PySequence_Fast_ITEMS(leaves), PySequence_Fast_GET_SIZE(leaves)))
        result = fast_path_run(self, PySequence_Fast_ITEMS(leaves));
    else
        result = Py_NewRef(Py_NotImplemented);
    Py_DECREF(leaves);
    return result;
}

static int
fast_path_traverse(FastPath *self, visitproc visit, void *arg)
{
    for (Py_ssize_t i = 0; i < self->nargs; i++) {
        Py_VISIT(self->expected[i].layout);
        Py_VISIT(self->expected[i].descr);
        Py_VISIT(self->expected[i].index);
        Py_VISIT(self->expected[i].arrange);
    }
    Py_VISIT(self->array_type);
    Py_VISIT(self->run);
    Py_VISIT(self->out_layouts);
    Py_VISIT(self->unflatten);
    Py_VISIT(self->failed);
    return 0;
}

static void
fast_path_dealloc(FastPath *self)
{
    PyObject_GC_UnTrack(self);
    for (Py_ssize_t i = 0; i < self->nargs; i++) {
        Py_XDECREF(self->expected[i].layout);
        Py_XDECREF(self->expected[i].descr);
        Py_XDECREF(self->expected[i].index);
        Py_XDECREF(self->expected[i].arrange);
        PyMem_Free(self->expected[i].shape);
    }
    PyMem_Free(self->expected);
    Py_XDECREF(self->array_type);
    Py_XDECREF(self->run);
    Py_XDECREF(self->out_layouts);
    Py_XDECREF(self->unflatten);
    Py_XDECREF(self->failed);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject FastPathType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "funccoll._native.FastPath",
    .tp_doc = "FastPath(expected, array_type, run, out_layouts, unflatten, failed)\n\n"
              "The call of one signature, from flat arguments; NotImplemented for others. `expected` has a layout for each Array,\n"
              "and (dtype, shape, is_block, index, arrange) for each array of NumPy's.",
    .tp_basicsize = sizeof(FastPath),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = fast_path_new,
    .tp_dealloc = (destructor)fast_path_dealloc,
    .tp_traverse = (traverseproc)fast_path_traverse,
    .tp_call = (ternaryfunc)fast_path_call,
};

/* ---------------------------------------------------------------- BlockCall */

typedef struct {
    PyObject_HEAD
    Py_ssize_t nargs;
    Expected *expected;
    PyObject *run;
    int is_group;         /* 1 where `run` is a PlanFastPath */
    PyObject *failed;     /* takes note of an exception */
} BlockCall;

static PyTypeObject BlockCallType;

static PyObject *
block_call_expect(BlockCall *self, PyObject *args)
{
    PyObject *expected, *run, *failed;
    if (self->expected != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "what is expected is set already");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!OO:expect", &PyTuple_Type, &expected, &run, &failed))
        return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(expected);
    if ((self->expected = PyMem_Calloc(n ? n : 1, sizeof(Expected))) == NULL)
        return PyErr_NoMemory();
    self->nargs = n;
    for (Py_ssize_t i = 0; i < n; i++) {
        Expected *e = &self->expected[i];
        PyObject *descr, *shape;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(expected, i), "OO!:expect", &descr, &PyTuple_Type, &shape)
            || set_type(e, descr, shape) < 0)
            return NULL;
    }
    self->run = Py_NewRef(run);
    self->is_group = PyObject_TypeCheck(run, &PlanFastPathType);
    self->failed = Py_NewRef(failed);
    Py_RETURN_NONE;
}

static PyObject *
block_call_call(BlockCall *self, PyObject *args, PyObject *kwargs)
{
    Py_ssize_t count = PyTuple_GET_SIZE(args);
    PyObject *const *blocks = ((PyTupleObject *)args)->ob_item, *outs = NULL;
    if (kwargs != NULL && PyDict_GET_SIZE(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "a compiled function of blocks takes no keywords");
        return NULL;
    }
    int good = self->run != NULL && count == self->nargs;
    for (Py_ssize_t i = 0; good && i < count; i++)
        good = is_expected(&self->expected[i], blocks[i]) && (((NumpyArray *)blocks[i])->flags & C_CONTIGUOUS);
    if (!good)
        return PyObject_CallMethodOneArg((PyObject *)self, str_fallback, args);
    int done = self->is_group ? plan_fast_path_run((PlanFastPath *)self->run, blocks, count, &outs) : 0;
    if (done > 0) {
        PyObject *copy = copy_of(outs);
        let_go(outs);
        outs = copy;
    } else if (done == 0)
        outs = PyObject_Vectorcall(self->run, blocks, count, NULL);
    if (outs == NULL && done != BEFORE_IT_BEGAN)
        note_exception(self->failed);
    return outs;
}

static int
block_call_traverse(BlockCall *self, visitproc visit, void *arg)
{
    for (Py_ssize_t i = 0; i < self->nargs; i++)
        Py_VISIT(self->expected[i].descr);
    Py_VISIT(self->run);
    Py_VISIT(self->failed);
    return 0;
}

static int
block_call_clear(BlockCall *self)
{
    Py_CLEAR(self->run);
    Py_CLEAR(self->failed);
    return 0;
}

static void
block_call_dealloc(BlockCall *self)
{
    PyObject_GC_UnTrack(self);
    block_call_clear(self);
    for (Py_ssize_t i = 0; i < self->nargs; i++) {
        Py_XDECREF(self->expected[i].descr);
        PyMem_Free(self->expected[i].shape);
    }
    PyMem_Free(self->expected);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef block_call_methods[] = {
    {"expect", (PyCFunction)block_call_expect, METH_VARARGS,
     "expect(types, run, failed)\n\n"
     "Set the (dtype, shape) of each array, the program that is called with them, and what is told of its exceptions."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject BlockCallType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "funccoll._native.BlockCall",
    .tp_doc = "The call of a program with contiguous arrays of the types that it expects; `fallback` gets others.",
    .tp_basicsize = sizeof(BlockCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)block_call_dealloc,
    .tp_traverse = (traverseproc)block_call_traverse,
    .tp_clear = (inquiry)block_call_clear,
    .tp_call = (ternaryfunc)block_call_call,
    .tp_methods = block_call_methods,
};

/* ---------------------------------------------------------------- Dispatch */

typedef struct {
    PyObject_HEAD
    PyObject *fast_paths;
} Dispatch;

static PyObject *
dispatch_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    Dispatch *self = (Dispatch *)type->tp_alloc(type, 0);
    if (self != NULL && (self->fast_paths = PyList_New(0)) == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

static PyObject *
dispatch_call(Dispatch *self, PyObject *args, PyObject *kwargs)
{
    if (kwargs == NULL || PyDict_GET_SIZE(kwargs) == 0) {
        PyObject **leaves = ((PyTupleObject *)args)->ob_item;
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->fast_paths); i++) {
            PyObject *fast_path = PyList_GET_ITEM(self->fast_paths, i);
            if (Py_IS_TYPE(fast_path, &FastPathType) && fits((FastPath *)fast_path, leaves, PyTuple_GET_SIZE(args))) {
                Py_INCREF(fast_path);
                PyObject *result = fast_path_run((FastPath *)fast_path, leaves);
                Py_DECREF(fast_path);
                if (result != Py_NotImplemented)
                    return result;
                Py_DECREF(result);
                break;
            }
        }
    }
    PyObject *empty = kwargs == NULL ? PyDict_New() : Py_NewRef(kwargs);
    if (empty == NULL)
        return NULL;
    PyObject *result = PyObject_CallMethodObjArgs((PyObject *)self, str_fallback, args, empty, NULL);
    Py_DECREF(empty);
    return result;
}

static int
dispatch_traverse(Dispatch *self, visitproc visit, void *arg)
{
    Py_VISIT(self->fast_paths);
    return 0;
}

static int
dispatch_clear(Dispatch *self)
{
    if (self->fast_paths != NULL)
        return PyList_SetSlice(self->fast_paths, 0, PyList_GET_SIZE(self->fast_paths), NULL);
    return 0;
}

static void
dispatch_dealloc(Dispatch *self)
{
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->fast_paths);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef dispatch_members[] = {
    {"fast_paths", T_OBJECT_EX, offsetof(Dispatch, fast_paths), READONLY, "Fast paths of known signatures, the last one first."},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject DispatchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "funccoll._native.Dispatch",
    .tp_doc = "A function that calls the first of its `fast_paths` that fits the arguments, or else `fallback(args, kwargs)`.",
    .tp_basicsize = sizeof(Dispatch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = dispatch_new,
    .tp_dealloc = (destructor)dispatch_dealloc,
    .tp_traverse = (traverseproc)dispatch_traverse,
    .tp_clear = (inquiry)dispatch_clear,
    .tp_call = (ternaryfunc)dispatch_call,
    .tp_members = dispatch_members,
};

/* ---------------------------------------------------------------- ArrayBase */

typedef struct {
    PyObject_HEAD
    PyObject *layout, *copies;
} ArrayBase;

static PyObject *
array_local(ArrayBase *self, void *Py_UNUSED(closure))
{
    if (self->layout != NULL && self->copies != NULL && Py_IS_TYPE(self->copies, ndarray_type)) {
        PyObject *is_one = PyObject_GetAttr(self->layout, str_is_one_block);
        if (is_one == NULL)
            return NULL;
        int one = is_one == Py_True;
        Py_DECREF(is_one);
        if (one && self->copies != NULL && Py_IS_TYPE(self->copies, ndarray_type)) {
            PyObject *copies = Py_NewRef(self->copies), *view = read_only_view(copies);
            Py_DECREF(copies);
            return view;
        }
    }
    return PyObject_CallMethodNoArgs((PyObject *)self, str_find_local);
}

/* NumPy asks for a buffer first. That of a whole value is its memory, read-only: np.asarray takes 0.4 µs, by the protocols of
 * the Python class 4. What has none (a value in several blocks, a type without a format) goes on by these. */
static int
array_getbuffer(ArrayBase *self, Py_buffer *view, int flags)
{
    view->obj = NULL;
    if (self->layout != NULL && self->copies != NULL && Py_IS_TYPE(self->copies, ndarray_type) && !(flags & PyBUF_WRITABLE)) {
        PyObject *is_whole = PyObject_GetAttr(self->layout, str_is_whole);
        if (is_whole == NULL)
            return -1;
        int whole = is_whole == Py_True;
        Py_DECREF(is_whole);
        if (whole && self->copies != NULL && Py_IS_TYPE(self->copies, ndarray_type)) {
            Py_ssize_t shift;
            if (find_shift(self->copies, &shift) < 0 || PyObject_GetBuffer(self->copies, view, flags) < 0)
                return -1;
            view->buf = (char *)view->buf + shift;
            view->readonly = 1;
            return 0;
        }
    }
    PyErr_SetString(PyExc_BufferError, "an Array is read-only, and not always one block of memory: use np.asarray(arr)");
    return -1;
}

static PyBufferProcs array_buffer = {(getbufferproc)array_getbuffer, NULL};

static int
array_traverse(ArrayBase *self, visitproc visit, void *arg)
{
    Py_VISIT(self->layout);
    Py_VISIT(self->copies);
    return 0;
}

static int
array_clear(ArrayBase *self)
{
    Py_CLEAR(self->layout);
    Py_CLEAR(self->copies);
    return 0;
}

static void
array_dealloc(ArrayBase *self)
{
    PyObject_GC_UnTrack(self);
    array_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef array_members[] = {
    {"layout", T_OBJECT_EX, offsetof(ArrayBase, layout), 0, NULL},
    {"_copies", T_OBJECT_EX, offsetof(ArrayBase, copies), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef array_getters[] = {
    {"local", (getter)array_local, NULL,
     "This process's block (read-only; on a GPU a CuPy array), where the process is one device.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject ArrayBaseType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "funccoll._native.ArrayBase",
    .tp_doc = "The fields of an Array.",
    .tp_basicsize = sizeof(ArrayBase),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)array_dealloc,
    .tp_traverse = (traverseproc)array_traverse,
    .tp_clear = (inquiry)array_clear,
    .tp_members = array_members,
    .tp_getset = array_getters,
    .tp_as_buffer = &array_buffer,
};

/* ---------------------------------------------------------------- the floating-point environment */

#if defined(__x86_64__)
#include <xmmintrin.h>
typedef unsigned int Environment;
#define DEFAULT_ENVIRONMENT 0x1F80u
#define IS_DEFAULT(e) (((e) & 0xFFC0u) == DEFAULT_ENVIRONMENT)  /* without the flags of exceptions that have occurred */
static Environment get_environment(void) { return _mm_getcsr(); }
static void set_environment(Environment e) { _mm_setcsr(e); }
#elif defined(__aarch64__)
typedef uint64_t Environment;
#define DEFAULT_ENVIRONMENT 0u
#define IS_DEFAULT(e) ((e) == DEFAULT_ENVIRONMENT)
static Environment get_environment(void) { uint64_t e; __asm__ volatile("mrs %0, fpcr" : "=r"(e)); return e; }
static void set_environment(Environment e) { __asm__ volatile("msr fpcr, %0" : : "r"(e)); }
#else
#include <fenv.h>
typedef int Environment;
#define DEFAULT_ENVIRONMENT FE_TONEAREST
#define IS_DEFAULT(e) ((e) == DEFAULT_ENVIRONMENT)
static Environment get_environment(void) { return fegetround(); }
static void set_environment(Environment e) { fesetround(e); }
#endif

static PyObject *
run_in_context(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count)
{
    if (count < 2) {
        PyErr_SetString(PyExc_TypeError, "run_in_context takes a context, a function and its arguments");
        return NULL;
    }
    PyObject *context = PyContext_Copy(args[0]), *result = NULL;
    if (context == NULL)
        return NULL;
    if (PyContext_Enter(context) == 0) {
        Environment saved = get_environment();
        int is_default = IS_DEFAULT(saved);
        if (!is_default)
            set_environment(DEFAULT_ENVIRONMENT);
        result = PyObject_Vectorcall(args[1], args + 2, count - 2, NULL);
        if (!is_default)
            set_environment(saved);
        if (PyContext_Exit(context) < 0)
            Py_CLEAR(result);
    }
    Py_DECREF(context);
    return result;
}

/* ---------------------------------------------------------------- the module */

extern PyMethodDef free_list_functions[]; /* _free_list.c */

static PyMethodDef functions[] = {
    {"use_arrays", use_arrays, METH_O, "use_arrays(type)\n\nSet the type of NumPy's arrays. Nothing else works before."},
    {"use_mapping", use_mapping, METH_O, "use_mapping(type)\n\nSet the type of memory that other processes see."},
    {"read_only", read_only, METH_O, "read_only(block)\n\nA new view of an array of NumPy's that nothing can write into."},
    {"guard_memory", guard_memory, METH_VARARGS,
     "guard_memory(start, nbytes)\n\nSay on stderr what was wrong, when this process writes into this memory, which is read-only."},
    {"array_fits", array_fits, METH_VARARGS,
     "array_fits(array, address, dtype, shape, contiguous)\n\nTrue when an array of NumPy's has these where this module reads them."},
    {"run_in_context", (PyCFunction)(void (*)(void))run_in_context, METH_FASTCALL,
     "run_in_context(context, function, *arguments)\n\n"
     "Call a function in a copy of a context, and in the default floating-point environment."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "funccoll._native",
    .m_doc = "The fast path of calls.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__native(void)
{
    struct { PyObject **name; const char *text; } names[] = {
        {&str_fallback, "fallback"}, {&str_finish, "finish"}, {&str_interrupted, "interrupted"},
        {&str_is_one_block, "is_one_block"}, {&str_view, "view"},
        {&str_find_local, "find_local"}, {&str_is_whole, "is_whole"}, {&str_shift, "shift"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        if ((*names[i].name = PyUnicode_InternFromString(names[i].text)) == NULL)
            return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddType(module, &PlanFastPathType) < 0 || PyModule_AddType(module, &FastPathType) < 0
        || PyModule_AddType(module, &BlockCallType) < 0 || PyModule_AddType(module, &RaggedCallType) < 0
        || PyModule_AddType(module, &DispatchType) < 0 || PyModule_AddType(module, &ArrayBaseType) < 0
        || PyModule_AddFunctions(module, free_list_functions) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
