// SPDX-License-Identifier: Apache-2.0
//
// How ucx fences its own memory, which near peers have mapped and store into.
//
// One owner, which fences twice, and one process with WORKERS workers, each with a lock and an
// import. An import carries the generation that it was told; the pages of the allocation are
// page 0. A worker may stop between any two steps, for as long as it takes; the process may
// also be killed, and an end of it may give the owner up, and tell it so. LATE: nothing is
// stored under an import of an epoch that a fence has ended into pages that the owner uses.
//
// -DUNLOCKED: a ping is answered while a store is under way. -DFORGETS: a fence that gave up is
// forgotten by the next one. -DSTORES: an end that has given the owner up goes on storing. All
// three are late.
//
// Which code each step is:
//
//   take, speaks, check, put, again, leave: batch.c: sl_ucx_move; direct.c: sl_ucx_move_direct,
//     under the lock of the worker
//   answer, place: shared.c: sl_ucx_export; import.c: sl_ucx_import
//   Progress: arrive.c: a ping is answered under the lock under which the worker stores; end.c:
//     sl_ucx_lose gives an owner up, and tells it so
//   begin, ask and the look at pong: fence.c: begin, ask, answered; a process that is dead has
//     answered
//   refresh, replace: fence.c: refresh, replace; a memory with fresh pages is mapped by no peer

#ifndef WORKERS
#define WORKERS 1
#endif

byte epoch = 0;
byte word = 0;            // the generation, on a page that peers map
bool exported = true;     // in this epoch
bool owed = false;        // peers may still store what they began in earlier ones
bool fresh = false;       // the range has pages that peers cannot map
bool used[2];             // pages that the owner uses: those of the allocation, fresh ones
byte fenced = 0;          // epochs before this one have ended
bool dead = false;

bool lock[WORKERS];
byte generation[WORKERS]; // of the import
byte ofEpoch[WORKERS];    // its epoch
byte ping[WORKERS], pong[WORKERS];
bool gone[WORKERS];       // it has given the owner up
bool reset[WORKERS];      // and the owner has heard that

inline store(me) {
	atomic { assert(!(fenced > ofEpoch[me] && used[0])); skip }
}

proctype Mover(byte me) provided (!dead) {
	byte tries = 0;
	do
	:: tries < 2 ->
		tries++;
take:		atomic { !lock[me] -> lock[me] = true };
speaks:		if
#ifndef STORES
		:: gone[me] -> goto leave
#endif
		:: else
		fi;
check:		if
		:: word != generation[me] -> skip // the owner serves it
		:: else ->
put:			store(me);
			store(me);
again:			skip // the word once more: whether the bytes count
		fi;
leave:		lock[me] = false
	:: else -> break
	od
}

// Importer asks for the memory anew, as other goroutines do. The answer is put to use later.
proctype Importer(byte me) provided (!dead) {
	byte told, when;
	bool may;
answer:	atomic {
		may = !fresh;
		exported = exported || may;
		told = word;
		when = epoch
	};
	if
	:: may ->
place:		atomic { !lock[me] -> generation[me] = told; ofEpoch[me] = when }
	:: else
	fi
}

// Progress answers pings, and may give the owner up, under the lock under which the worker stores.
proctype Progress(byte me) provided (!dead) {
end:	do
	:: atomic { !gone[me] && !lock[me] -> gone[me] = true }
	:: atomic { gone[me] && !reset[me] -> reset[me] = true }
#ifdef UNLOCKED
	:: atomic { ping[me] > pong[me] && !gone[me] -> pong[me] = ping[me] }
#else
	:: atomic { ping[me] > pong[me] && !lock[me] && !gone[me] -> pong[me] = ping[me] }
#endif
	od
}

proctype Killer() {
	if
	:: dead = true
	:: skip
	fi
}

inline ask(nonce) {
	for (i : 0 .. WORKERS-1) { ping[i] = nonce }
}

proctype Owner() {
	byte i, fence, mine;
	bool proved;
	for (fence : 1 .. 2) {
begin:		atomic {
			epoch++;
			mine = epoch;
			word++;
#ifdef FORGETS
			owed = exported;
#else
			owed = owed || exported;
#endif
			exported = false
		};
		proved = !owed;
		if
		:: owed ->
			ask(fence);
			i = 0;
			do
			:: i < WORKERS && (pong[i] >= fence || dead || reset[i]) -> i++
			:: i == WORKERS -> owed = false; proved = true; break
			:: break // a peer does not answer in time
			od;
			if
			:: proved
			:: !proved -> // frozen, for all that is known
refresh:			fresh = true;
				word++;
replace:			atomic { used[0] = false; used[1] = true };
				exported = false;
				owed = false;
				proved = true
			:: !proved // the context of the call is over: no answer
			fi
		:: else
		fi;
		if
		:: proved -> fenced = mine
		:: else
		fi
	}
}

init {
	atomic {
		used[0] = true;
		byte m;
		for (m : 0 .. WORKERS-1) { run Mover(m); run Importer(m); run Progress(m) }
		run Killer();
		run Owner()
	}
}
