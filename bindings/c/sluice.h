/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The C ABI of sluice: move bytes between HBM, DRAM and files, on one machine or
 * between machines. Link with `pkg-config --cflags --libs sluice`.
 *
 * Results. Every function returns 0 (SLUICE_OK), SLUICE_PENDING where it says so,
 * or a negative SLUICE_ERR_ code; sluice_error() then has the text, which says what
 * to do next where that is known. What is returned through pointers is written on
 * SLUICE_OK alone, except a length that a buffer was too small for.
 *
 * Handles are numbers, never 0. One that is stale, of another kind or made up gives
 * SLUICE_ERR_HANDLE. Closing an engine makes all handles of it stale, but for memory.
 *
 * Threads. Any thread may call anything at any time, also threads that the program
 * made itself, with one exception: add, add_pages, add_pattern, message, count, watch, post, reset
 * and close of one transfer belong to one thread at a time, as do the calls of one
 * sluice_sparse_step; a second one gets SLUICE_ERR_BUSY. No function calls back into the program.
 * Only those that take a timeout wait; SLUICE_FOREVER waits without one and 0 not at all.
 *
 * Memory. Arguments are read during the call and not kept, except: registered memory,
 * until the region is closed; index lists of pages and patterns, until the transfer is
 * reset or closed. Strings are UTF-8 and end with 0.
 *
 * Structs that begin with `size` carry sizeof of themselves, so that a program
 * built with an older header works with a newer library. All other fields may be 0,
 * which is the default. A newer program that sets what an older library lacks is told so.
 *
 * Signals. The library has a Go runtime, which starts when it is loaded and cannot be unloaded.
 * It takes SIGSEGV, SIGBUS and SIGFPE (a fault outside of Go goes on to the handler that was
 * there before), SIGPIPE (the same), SIGURG, and 33, which is glibc's own. It leaves all others
 * alone. Its first copy in C puts a handler before that of SIGSEGV and SIGBUS: a fault in
 * registered memory is SLUICE_ERR_FAULT of the transfer, and all others go on to it. Handlers
 * that a program installs before it loads the library go on working. One that is installed
 * later needs SA_ONSTACK, and for the signals above it should call the handler that it has
 * replaced. Threads of the runtime receive signals that are sent to the process.
 *
 * Exit. exit() and the return from main close all engines and rings, before what was registered
 * with atexit before the first was opened, and the destructors of objects that are older: transfers
 * end before the memory that they use. _exit closes nothing.
 *
 * Fork. After fork without exec every call in the child returns SLUICE_ERR_FORK:
 * the threads that do the work are not there. Fork before the library is loaded (dlopen),
 * or exec. Descriptors are closed on exec.
 */
#ifndef SLUICE_API_H
#define SLUICE_API_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of this header, as sluice_version() is of the library, pkg-config's and the Python package's. */
#define SLUICE_VERSION "0.1.0.dev0"

/* Raised when anything below changes in a way that a built program would notice. */
#define SLUICE_ABI_VERSION 2

#define SLUICE_FOREVER ((int64_t)-1)

enum {
	SLUICE_OK = 0,
	SLUICE_PENDING = 1,            /* not yet: nothing is wrong, ask again */
	SLUICE_ERR_HANDLE = -1,        /* stale, foreign, or of another kind */
	SLUICE_ERR_ARGUMENT = -2,      /* NULL, a size, or a value that does not exist */
	SLUICE_ERR_FORK = -3,          /* the child of a fork */
	SLUICE_ERR_SPACE = -4,         /* the buffer is too small; the length it needs is written */
	SLUICE_ERR_SYSTEM = -5,        /* the operating system; see the text */
	SLUICE_ERR_CLOSED = -6,
	SLUICE_ERR_UNAVAILABLE = -7,   /* a backend cannot work here; the text says what mends it */
	SLUICE_ERR_NOT_SUPPORTED = -8,
	SLUICE_ERR_FULL = -9,          /* a limit of sluice_config is reached */
	SLUICE_ERR_BUSY = -10,         /* in use: posted, listed by a transfer, name taken */
	SLUICE_ERR_BOUNDS = -11,       /* outside a range or limit */
	SLUICE_ERR_PEER_LOST = -12,    /* dead, frozen for too long, or closed */
	SLUICE_ERR_ABORTED = -13,      /* ended by sluice_abort */
	SLUICE_ERR_REVOKED = -14,      /* the owner ended the lease or the region */
	SLUICE_ERR_VERSION = -15,      /* the other side speaks another version */
	SLUICE_ERR_NO_ROUTE = -16,     /* no backend serves this pair of memories */
	SLUICE_ERR_CORRUPT = -17,      /* bytes that are not what they claim */
	SLUICE_ERR_TOKEN = -18,        /* a token that is cut, altered or foreign */
	SLUICE_ERR_UNPROVEN = -19,     /* the peer may still place what it has in hand */
	SLUICE_ERR_READ_ONLY = -20,    /* peers may only read that memory */
	SLUICE_ERR_TIMEOUT = -21,      /* a deadline has passed */
	/* registered memory, of either side, was unmapped, is protected, or its file was cut */
	SLUICE_ERR_FAULT = -22,
	SLUICE_ERR_MISSING = -23       /* a ring has no such object, or not any more */
};

typedef uint64_t sluice_engine;
typedef uint64_t sluice_memory;
typedef uint64_t sluice_region;
typedef uint64_t sluice_peer;
typedef uint64_t sluice_remote;
typedef uint64_t sluice_transfer;
typedef uint64_t sluice_lease;
typedef uint64_t sluice_listener;

/* SLUICE_ABI_VERSION of the library. */
uint32_t sluice_abi_version(void);

/* SLUICE_VERSION of the library. A constant; works in the child of a fork. */
const char *sluice_version(void);

/*
 * Why the last call on this thread that failed did. Never NULL; at most 1,023 bytes; valid
 * until the next call on this thread that fails. Works in the child of a fork.
 */
const char *sluice_error(void);

/* "SLUICE_ERR_BUSY" and so on; "unknown" for what is no code. A constant. */
const char *sluice_code_name(int code);

/* ---- engine ---- */

enum { SLUICE_OPTIONAL = 1 }; /* sluice_backend.flags: leave it out where it is unavailable */

/*
 * A backend by its name. Options are "name=value" strings ended by NULL, or NULL; durations are
 * "50ms" and the like, sizes may be "8MiB", booleans "true" and "false"; what is a list takes one
 * element an option.
 *   mem:   workers inline_max batches_max message_max
 *   shm:   workers inline_max piece_max keys_max jobs_max conns_max ring_bytes grace socket_dir
 *   tcp:   certificate key authority (files, PEM) server_name; or plaintext; listen
 *          advertise (a list) conns flight grace failure
 *   posix: path (ring, threads) threads depth piece_max gap_max buffered durable
 *   cuda:  library devices (a list of ordinals) sms in_flight streams peers
 *   gds:   library cuda threads depth piece_max buffer_max direct
 *   ucx:   library transports devices workers grace failure
 *   rdma:  library devices rails listen queue_depth slice flight timeout retries
 * tcp encrypts: by certificates of both sides or, without options, by a key of its own that its
 * description names. All peers do it alike. plaintext=true lets everybody on the network of listen
 * read and change what passes. posix reaches files of this process, cuda its
 * cards, gds both. A name that does not exist is SLUICE_ERR_ARGUMENT and the text lists those that
 * do.
 */
struct sluice_backend {
	const char *name;
	const char *const *options;
	uint32_t flags;
	uint32_t reserved; /* 0 */
};

/*
 * sluice_config.flags. PLAINTEXT: sluice_serve and sluice_dial over "tcp" exchange descriptions in
 * the open. Only on networks that are trusted: a program that connects is given one, and reaches
 * the regions in it. SCHEDULE: loads of a cache go before its prefetches and stores, and before
 * what it writes to disks.
 */
enum { SLUICE_PLAINTEXT = 1, SLUICE_SCHEDULE = 2 };

struct sluice_config {
	uint32_t size; /* sizeof(struct sluice_config) */
	uint32_t flags; /* of the above */
	const char *name; /* shown to peers, at most 255 bytes */
	/* at least one; earlier ones win where costs are equal */
	const struct sluice_backend *backends;
	size_t backends_count;
	int64_t transfer_timeout_ns; /* how long a transfer may make no progress; 30 s */
	int64_t abort_grace_ns; /* for a backend to end a transfer; 1 s */
	int64_t connect_timeout_ns; /* of connect and dial, with all tries; 30 s */
	int64_t handshake_timeout_ns; /* of one exchange with a peer that dials; 5 s */
	int64_t spin_ns; /* how long sluice_wait looks before it sleeps; 20 us; negative: not */
	int64_t staging_bytes; /* for chains of backends; 256 MiB; negative: none */
	uint64_t description_max; /* bytes; 16 MiB */
	uint32_t transfers_max; /* 4,096, at most 1,048,576 */
	uint32_t regions_max; /* 65,536 */
	uint32_t leases_max; /* 65,536 */
	uint32_t peers_max; /* 1,024 */
	uint32_t notifications_max; /* 1,024 that were not received yet */
	uint32_t handshakes_max; /* 64 at once */
	/* PEM, for "tcp" with TLS 1.3: all three or none; read again when they change */
	const char *cert_file;
	const char *key_file;
	const char *ca_file; /* whose members peers must be */
};

/*
 * Opens an engine, one for each process mostly. SLUICE_ERR_UNAVAILABLE: a backend that is not
 * optional.
 */
int sluice_open(const struct sluice_config *config, sluice_engine *engine);

/*
 * Ends transfers in flight (SLUICE_ERR_CLOSED), revokes leases, closes peers and regions, in
 * a time that abort_grace_ns bounds. Threads that wait for something of the engine return
 * with SLUICE_ERR_CLOSED. Its descriptors are closed: take them out of epoll first.
 */
int sluice_close(sluice_engine engine);

/*
 * Counters as JSON, into a buffer: *length is what it takes. SLUICE_ERR_SPACE: more than capacity.
 */
int sluice_stats(sluice_engine engine, void *buffer, size_t capacity, size_t *length);

/* ---- memory and regions ---- */

enum { SLUICE_NO_HUGE = 1, SLUICE_POPULATE = 2 }; /* sluice_alloc_options.flags */

struct sluice_alloc_options {
	uint32_t size;
	uint32_t flags;
	uint32_t node; /* NUMA node plus one; 0: any */
	uint32_t reserved; /* 0 */
};

/*
 * Zeroed memory that peers reach best, at *address. It is no handle of the engine's: it outlives
 * it and is given back by sluice_memory_close. Options may be NULL.
 */
int sluice_alloc(sluice_engine engine, const struct sluice_alloc_options *options, uint64_t length,
		 sluice_memory *memory, void **address);

/* Unmaps it. SLUICE_ERR_BUSY while a region lies on it. */
int sluice_memory_close(sluice_memory memory);

/* sluice_segment.kind */
enum { SLUICE_MEMORY = 1, SLUICE_HOST = 2, SLUICE_DEVICE = 3, SLUICE_FILE = 4 };
/* sluice_segment.flags */
enum { SLUICE_READ_ONLY = 1, SLUICE_PRIVATE = 2, SLUICE_DMABUF = 4, SLUICE_EXTENDS = 8,
       SLUICE_BUFFERED = 16 };

struct sluice_segment {
	uint32_t size;
	uint32_t kind; /* one of the above: says which fields count */
	/*
	 * READ_ONLY: for peers; PRIVATE: in no description; DMABUF: that field counts; EXTENDS: a
	 * FILE may end before the range does: a write makes it longer, a read of what was not
	 * written fails; BUFFERED: its bytes go through the page cache, where others go past it
	 */
	uint32_t flags;
	int32_t device; /* DEVICE: its ordinal */
	uint64_t length; /* bytes; MEMORY: 0 is all from offset on */
	uint64_t offset; /* MEMORY, FILE: in bytes, where it begins there */
	sluice_memory memory; /* MEMORY: of sluice_alloc */
	void *host; /* HOST: stays mapped and in place until the region is closed */
	uint64_t device_address; /* DEVICE */
	uint64_t dmabuf_offset; /* DEVICE with DMABUF */
	int32_t dmabuf; /* DEVICE with DMABUF: a descriptor, which may be closed afterwards */
	int32_t file; /* FILE: a descriptor, which stays open until the region is closed */
};

/* Makes memory known under a name that no other region has. Nothing is copied. */
int sluice_register(sluice_engine engine, const char *name, const struct sluice_segment *segment,
		    sluice_region *region);

/*
 * The same for many: all, or none and an error. A region that could not be closed then stays, and
 * has its handle in regions, which is 0 for the others.
 */
int sluice_register_many(sluice_engine engine, const char *const *names,
			 const struct sluice_segment *segments, size_t count,
			 sluice_region *regions);

/*
 * Revokes the region, so that no peer reaches it any more. SLUICE_ERR_BUSY while a transfer
 * lists it or a lease on it stands. After another error it is of no other use, and is to be called
 * again.
 */
int sluice_region_close(sluice_region region);

/* The same for many, in order, up to the first that cannot be closed. */
int sluice_region_close_many(const sluice_region *regions, size_t count);

/* ---- peers ---- */

/*
 * The bytes with which a peer connects: of the regions given, or of all when there are
 * none. A program that has them can reach those regions: send them over a channel that you trust.
 */
int sluice_describe(sluice_engine engine, const sluice_region *regions, size_t count,
		    void *buffer, size_t capacity, size_t *length);

/* A peer of such bytes. The engine's own give the engine as its own peer, as sluice_self does. */
int sluice_connect(sluice_engine engine, const void *description, size_t length, int64_t timeout_ns,
		   sluice_peer *peer);
int sluice_self(sluice_engine engine, sluice_peer *peer);

/*
 * Exchanges descriptions with peers that dial. Network is "unix" (peers of other users are
 * refused) or "tcp", for which sluice_config names certificates, or says SLUICE_PLAINTEXT. Bound,
 * if not NULL, gets the address, with the port that the kernel chose for port 0. A peer that
 * dialled is accepted, or closed when lost.
 */
int sluice_serve(sluice_engine engine, const char *network, const char *address,
		 char *bound, size_t capacity, sluice_listener *listener);
int sluice_listener_close(sluice_listener listener);

/* The next peer that came through sluice_serve. SLUICE_PENDING: none within the timeout. */
int sluice_accept(sluice_engine engine, int64_t timeout_ns, sluice_peer *peer);

/* Connects to an engine that serves there; when it returns the other side has connected back. */
int sluice_dial(sluice_engine engine, const char *network, const char *address, int64_t timeout_ns,
		sluice_peer *peer);

/* *lost is 1 when no connection to the peer is alive any more. Connect anew for another peer. */
int sluice_peer_lost(sluice_peer peer, int *lost);

/*
 * What is known of the peer, as JSON: "name", "origin" (the address and certificate of one that
 * dialled, else ""), "same_host", "message_max" (bytes; 0: no backend to it carries messages) and
 * its "regions" by name, each with "name", "kind" ("dram", "hbm" or "file"), "length" and
 * "read_only". Buffer as for sluice_stats.
 */
int sluice_peer_about(sluice_peer peer, void *buffer, size_t capacity, size_t *length);

/*
 * Takes newer bytes of the same engine: its regions become known. Remotes in use are not disturbed.
 */
int sluice_peer_refresh(sluice_peer peer, const void *description, size_t length);

/* Ends its transfers with SLUICE_ERR_CLOSED; its remotes are stale then, its transfers not. */
int sluice_peer_close(sluice_peer peer);

/* The peer's region of that name, as described; the same handle for as long as it is. */
int sluice_remote_find(sluice_peer peer, const char *name, sluice_remote *remote);

/* The same for many, with their lengths in bytes. */
int sluice_remote_find_many(sluice_peer peer, const char *const *names, size_t count,
			    sluice_remote *remotes, uint64_t *lengths);

/* A range that was leased to us, from the token of sluice_lease_token. */
int sluice_remote_import(sluice_peer peer, const void *token, size_t length, sluice_remote *remote);

int sluice_remote_length(sluice_remote remote, uint64_t *bytes);

/* SLUICE_ERR_BUSY while a transfer lists it. */
int sluice_remote_close(sluice_remote remote);

/* ---- transfers ---- */

enum { SLUICE_READ = 1, SLUICE_WRITE = 2 }; /* from the peer; to the peer */

/* One contiguous copy; offsets in bytes within region and remote. */
struct sluice_desc {
	uint64_t local, remote, length;
};

/* The same between ends of its own. */
struct sluice_copy {
	sluice_region region;
	sluice_remote remote;
	struct sluice_desc desc;
};

/*
 * Entries of one length: entry i lies at base + index[i] * stride on each side. A list of count
 * indices, or NULL: then index[i] is i. Lists stay the program's, unchanged until the transfer
 * is reset or closed.
 */
struct sluice_pages {
	uint32_t size;
	uint32_t flags; /* 0 */
	uint64_t count;
	uint64_t entry_length;
	uint64_t local_base, local_stride;
	uint64_t remote_base, remote_stride;
	const uint32_t *local, *remote;
};

/*
 * One loop of a sluice_pattern: repeats what is inside it n times, each local and remote bytes
 * behind the one before.
 */
struct sluice_loop {
	uint64_t local, remote; /* bytes */
	uint32_t n;
	uint32_t reserved; /* 0 */
};

/*
 * Where the entries of a sluice_pattern lie on one side: entry i at base + list[(first+i)/per] *
 * stride + ((first+i)%per) * step. Slots of per entries each, such as blocks of a KV cache. A list
 * has a number for each slot, and is kept as those of sluice_pages; NULL: the slots follow each
 * other.
 */
struct sluice_side {
	uint64_t base, stride, step; /* bytes */
	uint32_t first; /* entries of the first slot that are left out; below per */
	uint32_t per; /* entries of a slot; 0: 1 */
	const uint32_t *list;
};

/*
 * Entries of one shape, which the two sides may lay out differently: an entry is a nest of loops,
 * the outermost first, around a run of bytes. A byte that is written twice holds one of the values
 * afterwards.
 */
struct sluice_pattern {
	uint32_t size;
	uint32_t flags; /* 0 */
	uint64_t count; /* entries */
	uint64_t run; /* bytes that follow each other on both sides */
	uint32_t loops_count; /* at most 3; 0: an entry is one run */
	uint32_t reserved; /* 0 */
	struct sluice_loop loops[3];
	struct sluice_side local, remote;
};

/*
 * An empty transfer: filled once, posted many times. Only is the one backend that may serve it;
 * NULL: the engine chooses, and sluice_explain says what and why.
 */
int sluice_transfer_new(sluice_peer peer, uint32_t op, const char *only, sluice_transfer *transfer);

/*
 * sluice_route.flags. DURABLE: a write ends without error only once its bytes would survive a loss
 * of power, as those of a file do after a sync; a message follows then. What cannot say so
 * does not serve it: sluice_transfer_add gives SLUICE_ERR_NO_ROUTE where nothing can. Reads:
 * SLUICE_ERR_NOT_SUPPORTED.
 */
enum { SLUICE_DURABLE = 1 };

struct sluice_route {
	uint32_t size;
	uint32_t flags; /* of the above */
	const char *only; /* as for sluice_transfer_new */
};

/* The same with all that can be asked of a route. NULL: nothing. */
int sluice_transfer_new_route(sluice_peer peer, uint32_t op, const struct sluice_route *route,
			      sluice_transfer *transfer);

/*
 * Lists count copies. The array is read in place. On an error those before the wrong one are
 * listed.
 */
int sluice_transfer_add(sluice_transfer transfer, sluice_region region, sluice_remote remote,
			const struct sluice_desc *descs, size_t count);
int sluice_transfer_add_many(sluice_transfer transfer, const struct sluice_copy *copies,
			     size_t count);
int sluice_transfer_add_pages(sluice_transfer transfer, sluice_region region, sluice_remote remote,
			      const struct sluice_pages *pages);
int sluice_transfer_add_pattern(sluice_transfer transfer, sluice_region region,
				sluice_remote remote, const struct sluice_pattern *pattern);

/* A message that the peer receives after the data is visible there. */
int sluice_transfer_message(sluice_transfer transfer, const void *message, size_t length);

/*
 * Each post that is done from now on is told by sluice_completions, with this word of the
 * program's.
 */
int sluice_transfer_watch(sluice_transfer transfer, uint64_t word);

/*
 * Starts it and returns at once. Only misuse is an error here; what happens on the way is the
 * outcome.
 */
int sluice_post(sluice_transfer transfer);

/*
 * SLUICE_PENDING, or the outcome. For a thread that spins: where bytes are left that no thread of
 * the library copies, it copies some first, over shm up to piece_max.
 */
int sluice_test(sluice_transfer transfer);

/*
 * Waits for the outcome, copying along where that helps. SLUICE_PENDING: the timeout ended the
 * wait, not the transfer. With a timeout of 0 it is sluice_test.
 */
int sluice_wait(sluice_transfer transfer, int64_t timeout_ns);

/*
 * Both in one call: quicker for a thread that has nothing else to do, since it copies before others
 * wake.
 */
int sluice_post_and_wait(sluice_transfer transfer, int64_t timeout_ns);

/* The same with a message as by sluice_transfer_message, where each post has another one. */
int sluice_send(sluice_transfer transfer, const void *message, size_t length, int64_t timeout_ns);

/*
 * Ends it. On SLUICE_OK no byte of it lands any more, on either side, and sluice_test says how
 * it ended. SLUICE_PENDING: nothing is proved within the timeout, call again.
 */
int sluice_abort(sluice_transfer transfer, int64_t timeout_ns);

int sluice_reset(sluice_transfer transfer); /* empties the list, to be filled anew */
int sluice_transfer_close(sluice_transfer transfer); /* SLUICE_ERR_BUSY while posted: abort first */

/* ---- completions and messages, also for poll and epoll ---- */

struct sluice_completion {
	sluice_transfer transfer;
	uint64_t word; /* of sluice_transfer_watch */
	int32_t status; /* as sluice_test: SLUICE_PENDING when it has been posted anew meanwhile */
	int32_t reserved;
};

/*
 * A descriptor that is readable while a watched transfer has ended that sluice_completions
 * has not told of. It may be readable for nothing. Do not read or close it. Beside a thread that
 * spins it may be a millisecond late.
 */
int sluice_completion_fd(sluice_engine engine, int *fd);

/*
 * Takes at most max completions without waiting; *count may be 0. One entry a transfer, however
 * often it was posted.
 */
int sluice_completions(sluice_engine engine, struct sluice_completion *list, size_t max,
		       size_t *count);

/*
 * Sends a message without data, and returns when it is on its way. What the peer has yet to
 * acknowledge then, as over tcp, is lost with its connection alone, and nothing is told of it; a
 * close gives it time, a process that ends without one may not. SLUICE_ERR_TIMEOUT: the peer had no
 * room, and the message was taken back as by sluice_abort, which may cost the connection to a peer
 * that does not answer. To hear of the one, and where only the wait is to end in the other, post a
 * transfer that has a message alone.
 */
int sluice_notify(sluice_peer peer, const void *message, size_t length, int64_t timeout_ns);

struct sluice_notification {
	uint32_t size;
	int32_t status; /* SLUICE_OK, or SLUICE_ERR_PEER_LOST: the last word about this sender */
	/* 0: not connected to the sender, or no more. Not accepted yet: not to be closed */
	sluice_peer peer;
	uint64_t length; /* bytes of the message */
	/* 0: none had come behind it when the library last looked. An older library sets nothing */
	uint32_t more;
	uint32_t reserved;
};

/*
 * The next message, into the buffer. SLUICE_PENDING: none within the timeout. SLUICE_ERR_SPACE: it
 * is longer than capacity; notification->length says how long, and it stays the next one.
 */
int sluice_receive(sluice_engine engine, struct sluice_notification *notification,
		   void *buffer, size_t capacity, int64_t timeout_ns);

/*
 * Readable while there may be a message: receive with timeout 0 until SLUICE_PENDING. Do not read
 * or close it. SLUICE_ERR_BUSY: a thread receives just now; ask before any does.
 */
int sluice_notification_fd(sluice_engine engine, int *fd);

/* ---- leases ---- */

struct sluice_lease_options {
	uint32_t size;
	uint32_t flags; /* SLUICE_READ_ONLY */
	int64_t ttl_ns; /* 0: until it is revoked */
};

/* Permission to reach a range of a region, for a peer that holds its token. Options may be NULL. */
int sluice_lease_grant(sluice_region region, uint64_t offset, uint64_t length,
		       const struct sluice_lease_options *options, sluice_lease *lease);
int sluice_lease_token(sluice_lease lease, void *buffer, size_t capacity, size_t *length);

/*
 * *ended is 1 when its time is over and it is proved that no byte of the holder's lands any more.
 * Revoke it all the same.
 */
int sluice_lease_ended(sluice_lease lease, int *ended);

/*
 * Ends it; the handle is stale then. On SLUICE_OK no byte of the holder's lands any more, whatever
 * state it is in. After an error there is no proof yet: call again. Also for a lease whose time is
 * over.
 */
int sluice_lease_revoke(sluice_lease lease, int64_t timeout_ns);

/* ---- the KV cache ---- */

/*
 * A cache keeps blocks of KV by keys of 16 bytes: in a file of memory that outlives the process,
 * and on disks behind it. docs/cache.md has what is promised. This process opens it
 * (sluice_kv_open), or uses that of another, or those of all nodes of a cluster (sluice_kv_dial);
 * the calls are the same, but where they say otherwise.
 *
 * Each operation is one call for many keys, at most SLUICE_KV_KEYS_MAX.
 */
typedef uint64_t sluice_kv;
typedef uint64_t sluice_kv_namespace;
typedef uint64_t sluice_kv_op;
typedef uint64_t sluice_kv_token;

enum { SLUICE_KV_KEYS_MAX = 65536 };

/* The hash of a block's tokens and all before them, as the serving program has it. */
struct sluice_kv_key {
	uint8_t bytes[16];
};

/*
 * Opens a cache, with the blocks that a process before left in its files. Options are "name=value"
 * strings ended by NULL, as those of a backend:
 *   path          of the memory file, on /dev/shm or a hugetlbfs
 *   bytes         for blocks in memory
 *   extent        the longest block, and the unit in which bytes are cut; a 256th of bytes, 2 MiB
 *                 to 256 MiB
 *   blocks        how many it can know, 68 bytes of memory each; as many as the memory file that is
 *                 there, else the bytes of all tiers by 64 KiB
 *   policy        s3fifo (default), lru, arc: which block goes first
 *   verify_first  true: a block's CRC-32C is verified by its first load alone
 *   compare_known true: other bytes for a key that the cache has are a conflict, and told
 *   ops_max       operations at a time; 1,024
 *   hold_max      bytes that retained blocks of all namespaces keep in memory; half of it
 *   disk          the path of a file behind the memory; those that follow are of this disk:
 *   disk_bytes, disk_extent, disk_blocks
 *   disk_bytes_a_day  bounds what is written in 24 hours
 *   disk_durable  true: what is on it survives a loss of power
 *   disk_slow_after  without an answer for so long it is left alone; 5s
 * A disk needs the backend posix. The timeout is for a process before that still ends, which has
 * the file until then (SLUICE_ERR_TIMEOUT). sluice_close closes the caches of its engine first.
 */
int sluice_kv_open(sluice_engine engine, const char *const *options, int64_t timeout_ns,
		   sluice_kv *kv);

/*
 * Connects to a cache that another process serves ("unix", "tcp"), and tries again until the
 * timeout, at most connect_timeout_ns, while none serves there. The messages of the engine are the
 * cache's until it is closed: sluice_receive is SLUICE_ERR_BUSY, and so is this where a program
 * receives.
 *
 * Or to all nodes of a cluster (docs/cluster.md): those of a list ("nodes", with the address
 * "a=unix:/PATH,b=tcp:HOST:PORT"), or of an etcd ("etcd", "http://HOST:PORT,http://HOST:PORT", and
 * behind the last one "/PREFIX", where the nodes have another than sluice). It waits until one node
 * is reached. Then what a node has that is not reached, silent or late is missing, and a store of
 * it fails, without an error. No call of a cluster takes longer than a minute, whatever its timeout
 * is, and a tcp node wants a backend for that. SLUICE_ERR_NOT_SUPPORTED: sluice_kv_list and
 * sluice_kv_replace.
 */
int sluice_kv_dial(sluice_engine engine, const char *network, const char *address,
		   int64_t timeout_ns, sluice_kv *kv);

/*
 * Answers programs that dial this engine's sluice_serve by sluice_kv_dial, until the cache is
 * closed. The messages of the engine are the cache's, as for that. Of one that was opened alone.
 */
int sluice_kv_serve(sluice_kv kv);

/*
 * Ends all operations, detaches all regions and makes all handles of it stale. The files keep their
 * blocks. SLUICE_ERR_UNPROVEN: the cache may still reach memory; call it again.
 */
int sluice_kv_close(sluice_kv kv);

/*
 * Counters as JSON, as `sluice cache stat --json` has them; buffer as for sluice_stats. "attached"
 * says what sluice_kv_open found. Of one that was dialled the server has counted, which tells those
 * alone who have come by its Unix socket (SLUICE_ERR_SYSTEM), within 5 s (SLUICE_ERR_TIMEOUT). Of a
 * cluster it is what this process has seen of each node ("nodes": "state", "why", "requests" ...).
 */
int sluice_kv_stats(sluice_kv kv, void *buffer, size_t capacity, size_t *length);

/*
 * Waits until all blocks that were stored are on the disks, or will not be. SLUICE_ERR_TIMEOUT:
 * some are not yet.
 */
int sluice_kv_drain(sluice_kv kv, int64_t timeout_ns);

/*
 * Lets the cache read and write a region of its engine, for as long as it is attached. The region
 * may be private. Twice is once.
 */
int sluice_kv_attach(sluice_kv kv, sluice_region region, int64_t timeout_ns);

/*
 * Ends that: on SLUICE_OK the cache neither reads nor writes the region any more. Operations of it
 * that run fail, where the cache was dialled; else this waits for them, and SLUICE_ERR_TIMEOUT says
 * that some still run, SLUICE_ERR_UNPROVEN that a transfer of them was given up: the memory must
 * stay as long as the process runs.
 */
int sluice_kv_detach(sluice_kv kv, sluice_region region, int64_t timeout_ns);

struct sluice_kv_namespace_options {
	uint32_t size;
	uint32_t priority; /* blocks of a lower one go first; 0 to 7 */
	/* bytes that it may have in memory and on disks; 0: what there is */
	uint64_t memory_quota, disk_quota;
	/*
	 * The digest of what two processes must agree on to share a block: the model, its layout,
	 * the salt of a tenant
	 */
	uint8_t geometry[32];
	const char *name; /* at most 216 bytes */
	uint64_t hold_max; /* bytes that retained blocks keep; an eighth of the memory */
	int64_t ttl_ns; /* blocks that were not used for longer go; whole seconds; 0: never */
	uint32_t flow; /* when blocks go to the disks */
	uint32_t reserved; /* 0 */
};

/* As they are stored; when they are about to leave memory; never. */
enum { SLUICE_KV_WRITE_THROUGH = 0, SLUICE_KV_WRITE_BACK = 1, SLUICE_KV_MEMORY_ONLY = 2 };

/*
 * A namespace; one name with different geometries is different namespaces. Opening it again gives
 * the same handle, and changes its options, which are for the server to say where the cache was
 * dialled (SLUICE_ERR_ARGUMENT).
 */
int sluice_kv_namespace_open(sluice_kv kv, const struct sluice_kv_namespace_options *options,
			     int64_t timeout_ns, sluice_kv_namespace *space);

/*
 * Ends one open of it. The last one makes its handle stale, so that a call with it is
 * SLUICE_ERR_HANDLE, and waits for calls that run; while operations of it do it is SLUICE_ERR_BUSY.
 * The blocks stay. A name without blocks that nobody has open makes way for others. Of a cache that
 * was dialled it waits at most 1 s for the server, which has the name until sluice_kv_close where
 * it has not answered.
 */
int sluice_kv_namespace_close(sluice_kv_namespace space);

/*
 * A cluster finds the nodes of a block by its key alone. A program that knows the chains of blocks
 * may have it find them by chains, so that one is at few nodes: in the namespace that this makes
 * the keys of a call are a chain from its first block on, or go on where before, count keys, ends.
 * A block that was stored by its key is not found by its chain, nor the other way round. It ends
 * with sluice_kv_namespace_close, or with the last one of space. Of a cache of one node it is space
 * itself, opened once more.
 */
int sluice_kv_chain(sluice_kv_namespace space, const struct sluice_kv_key *before, size_t count,
		    sluice_kv_namespace *chain);

/* Where a block is, bits of sluice_kv_match: in both tiers, or stored at this moment. */
enum { SLUICE_KV_IN_MEMORY = 1, SLUICE_KV_ON_DISK = 2, SLUICE_KV_COMING = 4 };

/*
 * Writes to found where each block is, count bytes; *prefix is how many are there from the first
 * key on without a gap. Either may be NULL. It moves nothing. What was found may go before
 * it is loaded: SLUICE_KV_RETAIN has it stay. The timeout is for a cache that was dialled.
 */
int sluice_kv_match(sluice_kv_namespace space, const struct sluice_kv_key *keys, size_t count,
		    int64_t timeout_ns, uint8_t *found, size_t *prefix);

/* Forgets blocks: on SLUICE_OK no restart finds them. */
int sluice_kv_remove(sluice_kv_namespace space, const struct sluice_kv_key *keys, size_t count,
		     int64_t timeout_ns);

#define SLUICE_KV_LISTED_MAX 4096

/*
 * Lists keys of blocks that are there, in no order: *count of them, at most SLUICE_KV_LISTED_MAX,
 * for which keys has room. *at is 0 at first; it is where the next call goes on, and 0 behind the
 * last one. A call may find nothing and go on. It lists what is there as it looks.
 * SLUICE_ERR_SYSTEM (EACCES) of a server that lists nothing to this client: by tcp, unless its
 * operator lets it.
 */
int sluice_kv_list(sluice_kv_namespace space, uint32_t *at, int64_t timeout_ns,
		   struct sluice_kv_key *keys, size_t *count);

/* N of what is inside it, by bytes apart. */
struct sluice_kv_axis {
	uint64_t by;
	uint32_t n;
	uint32_t reserved; /* 0 */
};

/*
 * Where blocks lie in an attached region: block k of a call at base + slots[k] * stride. A block is
 * the runs of a nest of loops, the outermost first; in the cache one lies behind the other.
 */
struct sluice_kv_place {
	uint32_t size;
	uint32_t loops_count; /* at most 3; 0: a block is one run */
	sluice_region region;
	uint64_t base, stride; /* bytes */
	uint64_t run; /* bytes that follow each other */
	struct sluice_kv_axis loops[3];
	const uint32_t *slots; /* one a key */
};

/* What became of a block. */
enum {
	SLUICE_KV_UNDONE = 0,    /* the operation still runs */
	SLUICE_KV_DONE = 1,      /* the bytes are there */
	SLUICE_KV_KNOWN = 2,     /* store: the cache had it already; nothing was copied */
	SLUICE_KV_MISSING = 3,   /* load: the cache does not have it */
	SLUICE_KV_PENDING = 4,   /* another operation stores it at this moment */
	SLUICE_KV_DAMAGED = 5,   /* load: not the bytes that were stored; it is forgotten */
	SLUICE_KV_UNLIKE = 6,    /* load: it has another length */
	SLUICE_KV_CONFLICT = 7,  /* store: the cache has another length, or other bytes */
	SLUICE_KV_NO_ROOM = 8,   /* there is no room that may be taken; of a load: nor comes any */
	SLUICE_KV_LATE = 9,      /* the timeout of the operation was over */
	SLUICE_KV_FAILED = 10,   /* its transfer failed: sluice_kv_op_wait says why */
	SLUICE_KV_BUSY = 11      /* store: the cache cannot keep up: sluice_kv_op_wait says why */
};

/*
 * Starts to copy blocks to a place, or from it, and returns at once. The timeout bounds the
 * operation: what is not there by then is SLUICE_KV_LATE. Keys and slots are copied. Slots of a
 * load are all different: else sluice_kv_op_wait is SLUICE_ERR_BOUNDS, and nothing moves.
 * SLUICE_ERR_BUSY: ops_max operations run, or 1,024 of a cache that was dialled.
 */
int sluice_kv_load(sluice_kv_namespace space, const struct sluice_kv_key *keys, size_t count,
		   const struct sluice_kv_place *place, int64_t timeout_ns, sluice_kv_op *op);
int sluice_kv_store(sluice_kv_namespace space, const struct sluice_kv_key *keys, size_t count,
		    const struct sluice_kv_place *place, int64_t timeout_ns, sluice_kv_op *op);

/*
 * As sluice_kv_store, for keys that name something else than content: each block takes the place of
 * the one that its key has, at one moment, before which others find that one.
 */
int sluice_kv_replace(sluice_kv_namespace space, const struct sluice_kv_key *keys, size_t count,
		      const struct sluice_kv_place *place, int64_t timeout_ns, sluice_kv_op *op);

/*
 * Starts to read blocks from the disks into memory, for a load to come. It brings at most a quarter
 * of the memory; what is beyond is SLUICE_KV_NO_ROOM.
 */
int sluice_kv_prefetch(sluice_kv_namespace space, const struct sluice_kv_key *keys, size_t count,
		       int64_t timeout_ns, sluice_kv_op *op);

/*
 * A descriptor that is readable once the operation has ended, until sluice_kv_op_close. For poll
 * and epoll: do not read or close it.
 */
int sluice_kv_op_fd(sluice_kv_op op, int *fd);

/*
 * Waits for the end. SLUICE_PENDING: the timeout ended the wait, not the operation. Else outcomes,
 * count bytes or NULL, says what became of each block, whatever is returned: SLUICE_OK, or the
 * first error of a transfer. A block that is missing is no error. SLUICE_ERR_UNPROVEN: memory may
 * still be read or written until sluice_kv_detach says otherwise.
 */
int sluice_kv_op_wait(sluice_kv_op op, int64_t timeout_ns, uint8_t *outcomes, size_t count);

/* Ends it soon, as its timeout does. It does not wait. */
int sluice_kv_op_cancel(sluice_kv_op op);

/* Forgets it. One that runs goes on. */
int sluice_kv_op_close(sluice_kv_op op);

/*
 * What a program knows of blocks, and the cache cannot: nobody uses them soon; they stay for
 * last_ns (whole seconds, up to an hour, at most hold_max bytes) or until RELEASE; they leave
 * memory once a disk has them; they are read from the disks in the background.
 */
enum { SLUICE_KV_SESSION_END = 0, SLUICE_KV_RETAIN = 1, SLUICE_KV_RELEASE = 2, SLUICE_KV_DEMOTE = 3,
       SLUICE_KV_PREFETCH = 4 };

struct sluice_kv_hint_result {
	uint64_t applied, missing, refused; /* blocks; the error says why some were refused */
};

/*
 * Gives a hint and waits for nothing. *result, which may be NULL, is written unless the arguments
 * are refused. SLUICE_ERR_BOUNDS: RETAIN for less than a second, or for too long. A part of a
 * second is rounded up.
 */
int sluice_kv_hint(sluice_kv_namespace space, uint32_t kind, int64_t last_ns,
		   const struct sluice_kv_key *keys, size_t count, int64_t timeout_ns,
		   struct sluice_kv_hint_result *result);

/*
 * Gives the hints of a KvHintsEnvelope, in JSON, and writes what became of each action as JSON:
 * docs/cache.md lists the actions. After SLUICE_ERR_SPACE they are given all the same.
 */
int sluice_kv_hint_envelope(sluice_kv_namespace space, const void *envelope, size_t size,
			    int64_t timeout_ns, void *buffer, size_t capacity, size_t *length);

struct sluice_kv_estimate {
	uint32_t size;
	uint32_t measured; /* 1: by rates that were measured; 0: some are assumed */
	uint64_t memory_blocks, disk_blocks, missing;
	uint64_t memory_bytes, disk_bytes;
	int64_t time_ns; /* of a load of all */
};

/* What a load would take now. It moves nothing, and is no use of the blocks. */
int sluice_kv_estimate(sluice_kv_namespace space, const struct sluice_kv_key *keys, size_t count,
		       int64_t timeout_ns, struct sluice_kv_estimate *estimate);

/*
 * One answer of a cluster for several processes, as the ranks of a model, each of which has a chain
 * of its own: how many blocks all of them have, from the first on, and at which nodes, where they
 * are pinned for ttl_ns, from a second to an hour. keys has chains times count keys, at most
 * SLUICE_KV_CHAINS_MAX chains. One process asks, and hands what sluice_kv_token_bytes gives to the
 * others; each calls sluice_kv_load_pinned. Close the token once all have: that ends the pins.
 */
enum { SLUICE_KV_CHAINS_MAX = 1024 };
int sluice_kv_match_pinned(sluice_kv_namespace space, const struct sluice_kv_key *keys,
			   size_t count, size_t chains, int64_t ttl_ns, int64_t timeout_ns,
			   sluice_kv_token *token, size_t *prefix);

/* buffer as for sluice_stats; at most 4 MiB, of text that a program need not read. */
int sluice_kv_token_bytes(sluice_kv_token token, void *buffer, size_t capacity, size_t *length);
int sluice_kv_token_close(sluice_kv_token token);

/*
 * As sluice_kv_load, of a chain of a token, by its number: count is the prefix that was found.
 * SLUICE_ERR_MISSING of sluice_kv_op_wait: not all blocks were loaded, so none counts, and a group
 * has to agree that all its ranks miss. SLUICE_ERR_CORRUPT: these bytes are no token.
 */
int sluice_kv_load_pinned(sluice_kv_namespace space, const void *token, size_t length, size_t chain,
			  const struct sluice_kv_key *keys, size_t count,
			  const struct sluice_kv_place *place, int64_t timeout_ns,
			  sluice_kv_op *op);

/* ---- handing requests over between groups of ranks ---- */

/*
 * Prefill ranks hand the KV blocks of a request over to decode ranks, layer by layer while the
 * prefill computes, one-sided. The groups may differ in their number of ranks and in their layouts.
 * Each rank is an engine, and is connected to all ranks of the other group, both ways
 * (sluice_describe and sluice_connect). docs/promises.md has what is promised.
 */
typedef uint64_t sluice_handoff;         /* a rank of a group */
typedef uint64_t sluice_handoff_request; /* a request on that rank */

/* sluice_handoff_config.role */
enum { SLUICE_HANDOFF_SENDER = 1, SLUICE_HANDOFF_RECEIVER = 2 };

enum { SLUICE_HANDOFF_PLAN_MAX = 67108864 }; /* bytes of a plan */

struct sluice_handoff_config {
	uint32_t size;
	uint32_t role;
	uint32_t index; /* of this rank in its list of the plan */
	uint32_t reserved; /* 0 */
	/*
	 * JSON, {"senders": [side, ...], "receivers": [side, ...]}: what each rank keeps where. All
	 * ranks of both groups are given the same sides in the same order. A side has the fields
	 *   version  1
	 *   model    a name; the same on both sides
	 *   rank     of its group; dp: of data parallelism, for which each group has its own plan
	 *   regions  [{"name", "bytes"}]
	 *   groups   of views that share a block table: [{"blocks"}], how many the pool has; also
	 *            state (one slot a request), window (tokens that attention looks back), ring
	 *            (slots that are used in turn), shards, shard and interleave (of tokens)
	 *   views    one for each layer and part: [{"layer", "part" ("k", "v", "latent", ...),
	 *            "dtype", "cell" (bytes of one token in one unit), "units" (heads of the
	 *            model), "first", "count" (those held here), "tokens" (of a block), "region",
	 *            "group" (indices in the lists), "base", "block", "unit", "token"}]: the cell
	 *            of block b, unit u and token t lies at base + b*block + u*unit + t*token in
	 *            its region
	 */
	const char *plan;
	const sluice_region *regions; /* of this rank, as in its side; 0: no view lies there */
	const sluice_peer *peers; /* all ranks of the other group, in the order of the plan */
	uint32_t regions_count, peers_count;
	/*
	 * "name=value" strings ended by NULL, or NULL:
	 *   window          layers in flight of one request; 4
	 *   requests_max    at once; 256. A peer may have twice as many begun here
	 *   message_max     bytes of a part of a long message; 64 KiB
	 *   places_max      bytes of block tables and leases of peers, of all requests; 256 MiB
	 *   meet_timeout    for all ranks to begin a request; 30s
	 *   idle_timeout    between two signs of life of the senders; 60s
	 *   layer_timeout   for one layer to be moved; 10s
	 *   taken_timeout   from the last layer on, for all receivers to have all; 60s
	 *   revoke_timeout  to prove that nothing lands any more; 15s
	 *   notify_timeout  for a message to leave; 5s
	 */
	const char *const *options;
};

/*
 * Makes this engine a rank. The messages of the engine are those of its ranks until the last is
 * closed, as for sluice_kv_dial. SLUICE_ERR_ARGUMENT: the sides are not well formed, or cannot
 * exchange a cache; the text says what to change.
 */
int sluice_handoff_open(sluice_engine engine, const struct sluice_handoff_config *config,
			sluice_handoff *handoff);

/* Blocks of a request by its tokens: slot 0 has the first token. */
struct sluice_handoff_table {
	const uint32_t *blocks;
	uint64_t count;
};

/*
 * Begins a request on this rank and returns at once: a sender hands its tokens from from on, to
 * excluded, over, a receiver expects them in its blocks. All ranks of both groups begin it, in any
 * order, by one number, which names this hand-over for ever. There is a table for each group of
 * the side, which the call copies. What is wrong with the request is its outcome. Nothing else may
 * use the blocks of a receiver, or change those of a sender behind their sluice_handoff_layer,
 * until sluice_handoff_wait or sluice_handoff_abort says that they are free.
 */
int sluice_handoff_begin(sluice_handoff handoff, uint64_t number,
			 const struct sluice_handoff_table *tables, size_t count, uint64_t from,
			 uint64_t to, sluice_handoff_request *request);

/*
 * Of a sender: the layer is complete in this rank's memory, and goes over once all ranks have begun
 * the request. It does not wait. Each layer of this rank is told once, in any order; behind
 * the last one the request ends by itself. Else the outcome of a request that has ended.
 */
int sluice_handoff_layer(sluice_handoff_request request, uint32_t layer);

/* As sluice_kv_op_fd, until sluice_handoff_request_close. */
int sluice_handoff_fd(sluice_handoff_request request, int *fd);

/*
 * Waits for the end. SLUICE_PENDING: the timeout ended the wait, not the request. SLUICE_OK: a
 * receiver has all of it, or all receivers have confirmed what they get of this sender and of the
 * others; its blocks are free. Else why it ended, within the limits of config, on whichever rank
 * that was: SLUICE_ERR_PEER_LOST, _TIMEOUT, _ABORTED, _FULL (too many requests at a receiver) and
 * so on; its blocks are free all the same, but after SLUICE_ERR_UNPROVEN, where
 * sluice_handoff_abort says more. A receiver that has all stays so when others fail.
 */
int sluice_handoff_wait(sluice_handoff_request request, int64_t timeout_ns);

/*
 * Ends it on all ranks, unless it has ended. On SLUICE_OK the blocks of this rank are the
 * program's: no byte of a peer lands there any more, whatever state the peer is in. SLUICE_PENDING:
 * that is not proved within the timeout, call again. SLUICE_ERR_UNPROVEN: it never will be; do not
 * use the blocks again.
 */
int sluice_handoff_abort(sluice_handoff_request request, int64_t timeout_ns);

/* Forgets it. SLUICE_ERR_BUSY while it runs, or its blocks are not free: abort first. */
int sluice_handoff_request_close(sluice_handoff_request request);

/*
 * What has happened on this rank since it was opened, as JSON: requests "begun", "finished" and
 * "ended", those by why; "strays", messages that belonged to none; "quarantined", leases that could
 * not be revoked within revoke_timeout. Buffer as for sluice_stats.
 */
int sluice_handoff_stats(sluice_handoff handoff, void *buffer, size_t capacity, size_t *length);

/*
 * Ends all its requests, in a time that the limits bound, and makes their handles stale. The engine
 * and its regions stay. SLUICE_ERR_UNPROVEN: blocks of a request are not free; the handles stay,
 * call it again. sluice_close closes the ranks of its engine first.
 */
int sluice_handoff_close(sluice_handoff handoff);

/* ---- objects that many processes of a host read ---- */

/*
 * One process, the writer, has a ring of immutable objects, which others of its host and user read
 * where they lie. docs/ring.md has what is promised. No engine has a part in it.
 */
typedef uint64_t sluice_ring;        /* of the writer */
typedef uint64_t sluice_ring_reader;
typedef uint64_t sluice_ring_view;   /* an object that is held */

enum { SLUICE_RING_SUMS = 1 }; /* sluice_ring_config.flags: take CRC-32Cs, for sluice_ring_verify */

struct sluice_ring_config {
	uint32_t size;
	uint32_t flags;
	const char *path; /* of the Unix socket at which readers join */
	uint64_t bytes; /* for objects; taken at once */
	uint32_t objects; /* at most so many at a time; 4,096 */
	uint32_t readers; /* at most so many at a time, up to 64; 64 */
	uint32_t awaited; /* so many readers will come: what is put before waits for them as well */
	uint32_t note_length; /* at most 512 */
	const void *note; /* what each reader is told when it joins: sluice_ring_note */
	int64_t patience_ns; /* how long an object waits for those that have not got it; 60 s */
	/* how long a stopped reader keeps what it holds; 30 s; negative: for ever */
	int64_t frozen_ns;
};

/* Names an object of one writer, for its readers. It may travel any way. */
struct sluice_ring_handle {
	uint64_t generation;
	uint32_t row;
	uint32_t reserved; /* 0 */
};

/* A part of an object. */
struct sluice_ring_part {
	const void *bytes;
	uint64_t length;
};

/* Opens a ring and lets readers join. SLUICE_ERR_SYSTEM: another program listens at the path. */
int sluice_ring_open(const struct sluice_ring_config *config, sluice_ring *ring);

/*
 * Copies an object into the ring, its parts one behind the other, and hands it out to each reader:
 * it stays until all have got it, or for patience_ns where its room is needed. Where the ring is
 * full, others go that nobody holds or waits for; without such it waits. SLUICE_ERR_FULL: there was
 * none within the timeout; the text says who holds what. SLUICE_ERR_BUSY: the key is known.
 * SLUICE_ERR_BOUNDS: more than the ring has.
 */
int sluice_ring_put(sluice_ring ring, const char *key, const struct sluice_ring_part *parts,
		    size_t count, int64_t timeout_ns, struct sluice_ring_handle *handle);

/* Hands the object of a key out to each reader once more. It ends a touch. */
int sluice_ring_hand_out(sluice_ring ring, const char *key, struct sluice_ring_handle *handle);

/*
 * The handle of a key, and nothing is changed: the object may go before it is got. This one, those
 * above and below: SLUICE_ERR_MISSING if the ring has no object of the key.
 */
int sluice_ring_find(sluice_ring ring, const char *key, struct sluice_ring_handle *handle);

/* Keeps the object of a key until sluice_ring_hand_out or sluice_ring_end_touches. */
int sluice_ring_touch(sluice_ring ring, const char *key);
int sluice_ring_end_touches(sluice_ring ring);

/*
 * Has readers find the object of a key, or any, no more. Views stay as they are; the room is free
 * behind the last.
 */
int sluice_ring_remove(sluice_ring ring, const char *key);
int sluice_ring_clear(sluice_ring ring);

/*
 * What the writer has and has done, as JSON: "objects", "readers", "bytes" and "free" of them;
 * "puts", "handles" (handed out again), "evicted", "overdue" of those, before all readers had got
 * them, and "revoked", seats of stopped readers. Buffer as for sluice_stats.
 */
int sluice_ring_stats(sluice_ring ring, void *buffer, size_t capacity, size_t *length);

/*
 * Ends the ring: nobody joins or waits any more. Readers keep what they hold, and get what was
 * there. While views of the writer's own are open it is SLUICE_ERR_BUSY, and nothing has changed.
 */
int sluice_ring_close(sluice_ring ring);

/*
 * Asks the writer at a path for a seat until the timeout is over (SLUICE_ERR_TIMEOUT): it may still
 * have to come. SLUICE_ERR_SYSTEM (EPERM): another user's.
 */
int sluice_ring_join(const char *path, int64_t timeout_ns, sluice_ring_reader *reader);

/* The note of the writer. Buffer as for sluice_stats. */
int sluice_ring_note(sluice_ring_reader reader, void *buffer, size_t capacity, size_t *length);

/* *gone is 1 once the writer has ended: what it puts from then on needs another join. */
int sluice_ring_gone(sluice_ring_reader reader, int *gone);

/*
 * Holds an object where it lies until sluice_ring_view_close. A program that writes there ends by
 * SIGSEGV. reader may be a sluice_ring: the writer reads its own. SLUICE_ERR_MISSING: it has gone,
 * or the handle is of another ring. SLUICE_ERR_REVOKED: this reader was stopped for frozen_ns and
 * has lost its seat: join again.
 */
int sluice_ring_get(uint64_t reader, const struct sluice_ring_handle *handle, const void **bytes,
		    uint64_t *length, sluice_ring_view *view);

/* Compares the CRC-32C with that of the put. SLUICE_ERR_NOT_SUPPORTED without SLUICE_RING_SUMS. */
int sluice_ring_verify(sluice_ring_view view);

/*
 * Lets the object go. SLUICE_ERR_REVOKED: its bytes may have changed while they were held; it has
 * gone all the same.
 */
int sluice_ring_view_close(sluice_ring_view view);

/* Leaves. SLUICE_ERR_BUSY while views are open, and nothing has changed. */
int sluice_ring_leave(sluice_ring_reader reader);

/* ---- entries that sparse attention asks for ---- */

/*
 * A pool has the entries of a KV cache that sparse attention asks for in few slots near the card;
 * all of them lie in memory that has room for all. docs/sparse.md has the why. A set is a sequence
 * and a layer, or a few layers that share their top-k; its entries are numbered from 0 on.
 */
typedef uint64_t sluice_sparse;
typedef uint64_t sluice_sparse_step; /* a lookup, and the transfer of what it missed */

/* No entry, as in a list that is not full, and the slot of it. */
#define SLUICE_SPARSE_NONE UINT32_MAX

struct sluice_sparse_config {
	uint32_t size;
	uint32_t layers; /* that share a lookup, each with slots of its own; 1 */
	sluice_region region; /* of the slots */
	uint64_t base; /* bytes in region: of the first slot */
	uint64_t entry; /* bytes: 656, 584, 576, 132, any multiple of 4 */
	uint64_t stride; /* bytes from one slot to the next; entry */
	uint32_t sets;
	uint32_t slots; /* of a set; rounded up to 16, at least 32 */
};

/*
 * Makes a pool in which nothing is. *slots is how many slots a set has. Slot s, counted over all
 * sets, lies at base + (layer * sets * *slots + s) * stride.
 */
int sluice_sparse_open(const struct sluice_sparse_config *config, sluice_sparse *pool,
		       uint32_t *slots);

/*
 * Empties a set, as when its sequence has ended. SLUICE_ERR_BUSY while a step has missed entries of
 * it that have not come.
 */
int sluice_sparse_reset(sluice_sparse pool, uint32_t set);

/* SLUICE_ERR_BUSY while it has steps. */
int sluice_sparse_close(sluice_sparse pool);

/*
 * A step, which is used again and again: all entries lie in remote, stride bytes apart (0: as long
 * as an entry). Route may be NULL. Its calls belong to one thread at a time; a second one gets
 * SLUICE_ERR_BUSY.
 */
int sluice_sparse_step_new(sluice_sparse pool, sluice_remote remote, uint64_t stride,
			   const struct sluice_route *route, sluice_sparse_step *step);

struct sluice_sparse_batch {
	uint32_t size;
	uint32_t sets_count;
	uint32_t entries_count; /* of each set; no more than its slots */
	uint32_t shift; /* a block has 1 << shift entries */
	const uint32_t *sets; /* in ascending order */
	const uint32_t *entries; /* entries_count for each set */
	/* by entry >> shift; set i has those from starts[i] to starts[i+1], of sets_count + 1 */
	const uint32_t *blocks;
	const uint32_t *starts;
	uint32_t *slots; /* written: one for each entry */
	uint32_t *missed; /* written: indices in entries, with room for all of them */
	uint32_t *counts; /* written: how many of missed are of each set; NULL: not wanted */
	uint64_t page; /* bytes from block 0 to block 1 in remote; those of a block's entries */
};

/*
 * Finds the slots of entries, and gives those that are in none the slots of others that have not
 * been asked for longest: they are the *count of missed, each once. Until fetch or store, and wait,
 * have returned SLUICE_OK, their slots have other bytes, and the sets are this step's
 * (SLUICE_ERR_BUSY for others). A lookup misses again what the step has not brought before it.
 * Nothing has changed after SLUICE_ERR_BOUNDS.
 */
int sluice_sparse_lookup(sluice_sparse_step step, const struct sluice_sparse_batch *batch,
			 size_t *count);

/*
 * Looks up one window behind the other, the top-k of the last queries of a prefill: entries has
 * entries_count for each set of the first window, then of the second. What of them is in the pool
 * then is to be brought by one fetch: *count entries. missed may be NULL; it is not written.
 */
int sluice_sparse_warm(sluice_sparse_step step, const struct sluice_sparse_batch *batch,
		       size_t windows, size_t *count);

/*
 * Starts to bring what lookup or warm has missed, for each of the first count layers: entry e of
 * block b lies at its base + b * page + (e & (1 << shift) - 1) * stride of the remote. It returns
 * at once. After an error of it or of sluice_sparse_wait the pool has none of these entries.
 */
int sluice_sparse_fetch(sluice_sparse_step step, const uint64_t *bases, size_t count);

/* The other way: for new entries, whose bytes the program has put into the slots of missed. */
int sluice_sparse_store(sluice_sparse_step step, const uint64_t *bases, size_t count);

/*
 * A descriptor that is readable once what fetch or store has begun has ended, until the next of
 * them. It may be readable for nothing. For poll and epoll: do not read or close it. Ask for it
 * while nothing is under way: SLUICE_ERR_BUSY.
 */
int sluice_sparse_fd(sluice_sparse_step step, int *fd);

/*
 * Waits for the end of fetch or store, copying along where that helps; SLUICE_OK at once where
 * neither was called. SLUICE_PENDING: the timeout ended the wait alone.
 */
int sluice_sparse_wait(sluice_sparse_step step, int64_t timeout_ns);

/*
 * Ends fetch or store. On SLUICE_OK no byte of it lands any more, on either side, and the pool has
 * none of its entries. SLUICE_PENDING: that is not proved within the timeout, call again.
 */
int sluice_sparse_abort(sluice_sparse_step step, int64_t timeout_ns);

/* SLUICE_ERR_BUSY while a fetch or store is under way: wait or abort first. */
int sluice_sparse_step_close(sluice_sparse_step step);

/* ---- why ---- */

enum { SLUICE_TEXT = 1, SLUICE_JSON = 2 };

/*
 * Which backends could serve, what the engine would choose, and why. Buffer as for sluice_stats;
 * text ends with 0.
 */
int sluice_explain(sluice_peer peer, sluice_region region, sluice_remote remote, uint32_t format,
		   void *buffer, size_t capacity, size_t *length);

#ifdef __cplusplus
}
#endif
#endif
