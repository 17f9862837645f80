// SPDX-License-Identifier: Apache-2.0
//
// How shm revokes memory that the peer has mapped.
//
// One owner, and one process of movers that hold a grant of epoch 0. Each statement is one
// step, so a mover may be stopped between any two of them, for as long as it takes, and go on
// later; it may also be killed (never scheduled again). Pages are numbered: the lease lies in
// page 0. LATE: no mover writes into pages that the owner uses once Revoke has returned.
//
// With -DAGAIN pages of the arena move for others, too, before the revoke and after it, and pages of
// before are used again once each writer that stood when they were left has gone on.
//
// -DBLIND uses them again whoever writes there, and -DBEFORE lists those writers before the
// generation moves on. -DOLD is the order of steps before the mend: the epoch before the
// generation, and the generation compared with that of the mapping, whichever it is by then. A
// mover that is stopped in between finds fresh pages.
//
// Which code each step is:
//
//   announce, take, check, acquire, copy, leave: initiator.go: move, in this order
//   bump, scan: proof.go: Revoke; a mover that stays for Config.Grace is silent
//   renew: proof.go: shutOut; Buffer.Renew in internal/hostmem: the generation moves on and the
//     writers that stand are listed (OnRenew in memory.go, oldWriters in proof.go), then fresh
//     pages come under the range (reclaim in layer.go: old ones). What Revoke made harmless
//     (abandoned) has pages from before, and is not listed again
//   the last choice of Owner: memory.go: releaseArena; the number serves another arena
//   answer, place: owner.go, fetch.go: the owner describes an arena, another goroutine maps it

#ifndef MOVERS
#define MOVERS 2
#endif
#define OWN 4      // pages of the arena
#define PAGES 5    // and one of another
#ifndef AGAIN
#define RENEWALS 0 // for others, each before and after the revoke
#else
#define RENEWALS 1
#endif

byte epoch = 0;              // of the lease, in the owner's table
byte generation = 0;         // of the arena's number, in the owner's table
byte under = 0;              // the pages under the range, of the arena that has the number
bool used[PAGES];            // pages that the owner uses
bool proved = false;         // Revoke has returned nil
byte announced[MOVERS];      // 0, or the number of the announcement
byte abandoned[MOVERS];      // the one that Revoke made harmless
byte writers[PAGES * MOVERS]; // by page: those that stood when it was left
bool moving = false;         // the lock that keeps the pages where they are
bool dead = false;           // the process of the movers was killed

byte mappedPages = 0;        // the mapping that the movers share
byte mappedGeneration = 0;

#define OUT(p, m) (writers[(p)*MOVERS + (m)] == 0 || \
	writers[(p)*MOVERS + (m)] != announced[m] || dead)
#ifdef BLIND
#define OVER(p) (true)
#elif MOVERS == 1
#define OVER(p) (OUT(p, 0))
#else
#define OVER(p) (OUT(p, 0) && OUT(p, 1))
#endif

// write is one byte of a copy.
inline write(pages) {
	atomic { assert(!(proved && used[pages])); skip }
}

proctype Mover(byte me) provided (!dead) {
	byte taken, pages, was;
	byte tries = 0;
	do
	:: tries < 2 ->
		tries++;
announce:	announced[me] = tries;
#ifndef OLD
take:		taken = generation;
#endif
check:		if
		:: epoch != 0 -> announced[me] = 0; goto revoked
		:: else
		fi;
acquire:	atomic { pages = mappedPages; was = mappedGeneration };
#ifdef OLD
		taken = generation;
#endif
		if
		:: was != taken -> announced[me] = 0 // stale: map anew, and once more
		:: else ->
copy:			write(pages);
			write(pages);
leave:			announced[me] = 0;
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
answer:		atomic { !moving -> pages = under; was = generation };
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

// list notes the writers that stand.
inline list() {
	i = 0;
	do
	:: i < MOVERS ->
		atomic { standing[i] = (announced[i] == abandoned[i] -> 0 : announced[i]); i++ }
	:: else -> break
	od
}

inline renew() {
	// The owner uses the fresh pages; what is written to the old ones is lost.
	moving = true;
#ifdef BEFORE
	list();
#endif
	generation++;
#if defined(AGAIN) && !defined(BEFORE)
	list();
#endif
	atomic {
		fresh = 0;
		do
		:: used[fresh] || !OVER(fresh) -> fresh++
		:: else -> break
		od;
		assert(fresh < OWN);
		used[under] = false;
		i = 0;
		do
		:: i < MOVERS -> writers[under*MOVERS + i] = standing[i]; i++
		:: else -> break
		od;
		under = fresh;
		used[fresh] = true;
		moving = false
	}
}

proctype Owner() {
	byte i, fresh, renewals;
	byte standing[MOVERS];
	byte seen[MOVERS];
	bool silent;
	do
	:: renewals < RENEWALS -> renewals++; renew()
	:: break
	od;
bump:	epoch++;
scan:	i = 0; silent = false;
	do
	:: i < MOVERS ->
		if
		:: announced[i] == 0 -> i++
		:: announced[i] != 0 && dead -> i++ // the kernel says that the process is gone
		:: atomic { announced[i] != 0 && !dead -> seen[i] = announced[i] };
			silent = true; i++ // for Grace, or for ever
		:: announced[i] != 0 && !dead -> skip // look again
		fi
	:: else -> break
	od;
	if
	:: silent ->
		renew();
#ifdef AGAIN
		i = 0;
		do
		:: i < MOVERS -> abandoned[i] = seen[i]; i++
		:: else -> break
		od
#endif
	:: else
	fi;
	proved = true;
	do
	:: renewals < 2*RENEWALS -> renewals++; renew()
	:: break
	od;
	// The lease's memory has another use now. Or it is given back: its number goes to
	// another arena, the program uses the pages for something else.
	if
	:: generation++; atomic { under = PAGES-1; used[PAGES-1] = true }
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
