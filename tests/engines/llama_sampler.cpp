// Loaded into the process of llama.cpp's server (LD_PRELOAD): the next token of a script gets all the probability. Slots,
// prompts, cache and checkpoints are llama.cpp's own. It keeps the tokens of each sequence, and asks the program that
// started the server, over a socket, what follows a prompt.
#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

using Ids = std::vector<int32_t>;
struct Playing { Ids prompt, script; };
struct Row { int32_t sequence, token; };
static std::map<int32_t, Ids> held;
static std::map<const void *, Ids> saved;
static std::map<int32_t, Playing> playing;
static std::vector<Row> rows;

template <class F> static F *real(const char *name) {
    static void *library = dlopen(getenv("LLAMA_SAMPLER_LIBRARY"), RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<F *>(dlsym(library, name));
}
#define REAL(name) real<decltype(name)>(#name)

static void transfer(bool out, int at, void *data, size_t size) {
    for (size_t done = 0; done < size;) {
        char *next = static_cast<char *>(data) + done;
        ssize_t moved = out ? write(at, next, size - done) : read(at, next, size - done);
        if (moved <= 0) abort();
        done += moved;
    }
}

static Ids ask(Ids prompt, bool ended) {
    sockaddr_un address{AF_UNIX, {}};
    strncpy(address.sun_path, getenv("LLAMA_SAMPLER_SOCKET"), sizeof address.sun_path - 1);
    int at = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(at, reinterpret_cast<sockaddr *>(&address), sizeof address)) abort();
    int32_t count = prompt.size(), flag = ended;
    transfer(true, at, &flag, sizeof flag);
    transfer(true, at, &count, sizeof count);
    transfer(true, at, prompt.data(), count * sizeof count);
    transfer(false, at, &count, sizeof count);
    Ids script(count);
    transfer(false, at, script.data(), count * sizeof count);
    close(at);
    return script;
}

extern "C" {
const void *llama_get_model(const void *);
const void *llama_model_get_vocab(const void *);
int32_t llama_vocab_n_tokens(const void *);

void llama_batch_ext_clear(void *batch) {
    rows.clear();
    REAL(llama_batch_ext_clear)(batch);
}

int32_t llama_batch_ext_add_token(void *batch, int32_t sequence, int32_t token) {
    rows.push_back({sequence, token});
    return REAL(llama_batch_ext_add_token)(batch, sequence, token);
}

bool llama_batch_ext_set_pos(void *batch, int32_t row, const int32_t *position) {
    if (row < static_cast<int32_t>(rows.size())) {
        Ids &ids = held[rows[row].sequence];
        ids.resize(*position);
        ids.push_back(rows[row].token);
    }
    return REAL(llama_batch_ext_set_pos)(batch, row, position);
}

float *llama_get_logits_ith(void *context, int32_t row) {
    float *logits = REAL(llama_get_logits_ith)(context, row);
    if (!logits || row < 0 || row >= static_cast<int32_t>(rows.size())) return logits;
    const Ids &ids = held[rows[row].sequence];
    Playing &now = playing[rows[row].sequence];
    size_t begin = now.prompt.size(), at = ids.size() - begin;
    if (ids.size() < begin || at >= now.script.size() || !std::equal(ids.begin(), ids.begin() + begin, now.prompt.begin())
        || !std::equal(ids.begin() + begin, ids.end(), now.script.begin())) {
        now = {ids, ask(ids, false)};
        at = 0;
    }
    const void *vocabulary = REAL(llama_model_get_vocab)(REAL(llama_get_model)(context));
    std::fill(logits, logits + REAL(llama_vocab_n_tokens)(vocabulary), -INFINITY);
    logits[now.script[at]] = 0;
    if (at + 1 == now.script.size()) ask(now.prompt, true);
    return logits;
}

// A prompt that leaves its slot for llama.cpp's cache in memory, and comes back; with flags it is a checkpoint of a state.
size_t llama_state_seq_get_data_ext(void *context, uint8_t *to, size_t size, int32_t sequence, uint32_t flags) {
    if (!flags) saved[to] = held[sequence];
    return REAL(llama_state_seq_get_data_ext)(context, to, size, sequence, flags);
}

size_t llama_state_seq_set_data_ext(void *context, const uint8_t *from, size_t size, int32_t sequence, uint32_t flags) {
    if (!flags && saved.count(from)) held[sequence] = saved[from];
    return REAL(llama_state_seq_set_data_ext)(context, from, size, sequence, flags);
}

// A slot that was saved in a file, and is restored.
size_t llama_state_seq_load_file(void *context, const char *path, int32_t sequence, int32_t *tokens, size_t room, size_t *count) {
    size_t size = REAL(llama_state_seq_load_file)(context, path, sequence, tokens, room, count);
    // Without room it only asks how many there are. Before them stand -1, a version and their count.
    if (size && tokens && *count <= room && *count > 2 && tokens[0] < 0) held[sequence].assign(tokens + 3, tokens + 3 + tokens[2]);
    else if (size && tokens && *count <= room) held[sequence].assign(tokens, tokens + *count);
    return size;
}

// --cache-reuse moves a part of a prompt that stands behind a change.
void llama_memory_seq_add(void *memory, int32_t sequence, int32_t begin, int32_t end, int32_t by) {
    Ids &ids = held[sequence];
    end = end < 0 ? ids.size() : std::min<int32_t>(end, ids.size());
    if (by < 0 && begin + by >= 0 && begin < end) std::copy(ids.begin() + begin, ids.begin() + end, ids.begin() + begin + by);
    REAL(llama_memory_seq_add)(memory, sequence, begin, end < 0 ? -1 : end, by);
}
}
