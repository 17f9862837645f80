// SPDX-License-Identifier: Apache-2.0
//
// How shm fences memory that the peer has mapped.
//
// One owner, and one process of movers that hold a grant of epoch 0. Each statement is one
// step, so a mover may be stopped between any two of them, for as long as it takes, and go on
// later; it may also be killed (never scheduled again). Pages are numbered: the lease lies in
// page 0, fresh pages get the next number. LATE: no mover writes into pages that the owner uses
// once Fence has returned.
//
// -DOLD is the order of steps before the mend: the epoch before the generation, and the
// generation compared with that of the mapping, whichever it is by then. A mover that is
// stopped in between finds fresh pages.
//
// Which code each step is:
//
//   announce, take, check, acquire, copy, leave: move.go: announce in move; then moveMapped in
//     this order
//   bump, scan: fence.go: Fence, copies; a mover that stays for Config.Grace is silent
//   renew: fence.go: shutOut; the generation moves on (OnRenew in arena.go), then fresh pages
//     come under the range
//   the last choice of Owner: arena.go: releaseArena; the number serves another arena
//   answer, place: extents.go, fetch.go: the owner describes an arena, another goroutine maps it

#ifndef MOVERS
#define MOVERS 2
#endif
#define PAGES 5

byte epoch = 0;              // of the lease, in the owner's table
byte generation = 0;         // of the arena's number, in the owner's table
byte under = 0;              // the pages under the range, of the arena that has the number
bool used[PAGES];            // pages that the owner uses
bool fenced = false;         // Fence has returned nil
bool announced[MOVERS];
bool dead = false;           // the process of the movers was killed

byte mappedPages = 0;        // the mapping that the movers share
byte mappedGeneration = 0;

// write is one byte of a copy.
inline write(pages) {
	atomic { assert(!(fenced && used[pages])); skip }
}

proctype Mover(byte me) provided (!dead) {
	byte taken, pages, was;
	byte tries = 0;
	do
	:: tries < 2 ->
		tries++;
announce:	announced[me] = true;
#ifndef OLD
take:		taken = generation;
#endif
check:		if
		:: epoch != 0 -> announced[me] = false; goto revoked
		:: else
		fi;
acquire:	atomic { pages = mappedPages; was = mappedGeneration };
#ifdef OLD
		taken = generation;
#endif
		if
		:: was != taken -> announced[me] = false // stale: map anew, and once more
		:: else ->
copy:			write(pages);
			write(pages);
leave:			announced[me] = false;
			if
			:: generation != taken -> skip // stale: copy once more
			:: else -> break
			fi
		fi
	:: else -> break
	od;
revoked: skip
}

// Fetcher maps the arena anew, as other goroutines of the movers' process do. The answer is
// given under the lock that keeps the pages where they are; it is put to use later.
proctype Fetcher() provided (!dead) {
	byte pages, was;
	byte times = 0;
	do
	:: times < 2 ->
		times++;
answer:		atomic { pages = under; was = generation };
place:		atomic { mappedPages = pages; mappedGeneration = was }
	:: break
	od
}

// Killer kills the movers' process at any moment.
proctype Killer() {
	if
	:: dead = true
	:: skip
	fi
}

inline renew(fresh) {
	// The owner uses the fresh pages; what is written to the old ones is lost.
	generation++;
	atomic { used[under] = false; under = fresh; used[fresh] = true }
}

proctype Owner() {
	byte i;
	bool silent;
bump:	epoch++;
scan:	i = 0; silent = false;
	do
	:: i < MOVERS ->
		if
		:: !announced[i] -> i++
		:: announced[i] && dead -> i++ // the kernel says that the process is gone
		:: announced[i] && !dead -> silent = true; i++ // for Grace, or for ever
		:: announced[i] && !dead -> skip // look again
		fi
	:: else -> break
	od;
	if
	:: silent -> renew(1)
	:: else
	fi;
	fenced = true;
	// The lease's memory has another use now. Or it is given back: its number goes to
	// another arena, the program uses the pages for something else.
	if
	:: generation++; atomic { under = 3; used[3] = true }
	:: skip
	fi
}

init {
	atomic {
		used[0] = true;
		byte m;
		for (m : 0 .. MOVERS-1) { run Mover(m) }
		run Fetcher();
		run Killer();
		run Owner()
	}
}
