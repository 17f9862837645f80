// SPDX-License-Identifier: Apache-2.0
//
// How cuda revokes device memory that another process has mapped. A process may be killed: then
// it stands still for ever, but for its copies, since a child that it forked keeps its context.
//
// One owner, and one process whose batches write to two leases of epoch 0, parts of one
// allocation. The owner revokes one, then the other. Each statement is one step, so a batch may
// be stopped between any two of them, for as long as it takes, and go on later; its copy goes
// on also while its process stands still. Memory is numbered: the allocation begins with 0,
// what comes under its addresses gets the next number.
//
// LATE: no copy writes to memory that the owner uses through a lease that was revoked. LOST: a
// batch whose lease was not revoked when it was told to have succeeded has its bytes in the
// memory that the owner uses.
//
// -DMORTAL: copies are taken to end with their process.
// -DUNANNOUNCED: a batch looks at its import before it is counted, as reads most naturally.
// -DUNJUDGED: the end of the copies is the end of the batch: the import is not looked at again.
// -DEARLY: memory that replaces the other is offered before the batches that write are out.
//
// Which code each step is:
//
//   announced, good: proof.go: enter; tests park it at points of these names
//   shown, launched: initiator.go: start
//   ended, judged, told, out: initiator.go: finish; proof.go: overtaken, leave
//   over, in: memory.go: end; proof.go: untilQuiet; after Config.RevokeGrace a process is silent
//   moves, drain, moved, replace, disown: proof.go: renew, in this order

#define BATCHES 3
#define MEMORIES 3
#define GOOD 0  // importGood
#define OVER 1  // importRevoked
#define MOVES 2 // importMoving
#define MOVED 3 // importMoved

byte state[2] = GOOD;    // of the import of each lease; the owner writes it
byte users[2] = 0;       // batches that are in; the other process writes it
bool proved[2] = false;  // Revoke has returned nil
bool lost[2] = false;    // the owner waits no more for what came in by this import
byte under = 0;          // memory under the allocation
bool dead = false;       // the other process was killed
bool placed[9];          // MEMORIES * BATCHES: which memory has the bytes of a batch

// A batch names a lease, and the memory that the import has mapped, which is 0 for all of epoch 0: a
// later import is of a new slot, and another story.
proctype Batch(byte me; byte lease) {
#ifdef UNANNOUNCED
good:	if
	:: state[lease] != GOOD -> goto refused
	:: else
	fi;
announced: users[lease]++;
#else
announced: users[lease]++;
good:	if
	:: state[lease] != GOOD -> goto out
	:: else
	fi;
#endif
shown:	skip;      // a cancel finds the batch from here on, and may end it here
	if
	:: state[lease] == OVER -> goto out
	:: skip
	fi;
launched: skip;
copy:	atomic {
		assert(!(proved[lease] && under == 0)); // LATE
		placed[me] = true                       // in memory 0
	};
ended:	skip;
#ifndef UNJUDGED
judged:	if
	:: state[lease] == OVER || state[lease] == MOVED -> goto out
	:: else
	fi;
#endif
	// The word of success is given under no lock: Revoke may have returned meanwhile.
told:	atomic {
		assert(proved[lease] || under == 0 || placed[under * BATCHES + me]) // LOST
	};
out:	atomic { users[lease]--; goto gone };
refused: skip;
gone:	skip
}

// Killer kills the other process at any moment.
proctype Killer() {
	if
	:: dead = true
	:: skip
	fi
}

// replace puts other memory under the allocation, with what the other one has now.
inline replace(fresh) {
	atomic {
		b = 0;
		do
		:: b < BATCHES -> placed[(fresh) * BATCHES + b] = placed[under * BATCHES + b]; b++
		:: else -> break
		od;
		b = 0;
		under = fresh
	}
}

inline turn(which, from, to) {
	atomic {
		if
		:: state[which] == from -> state[which] = to
		:: else
		fi
	}
}

proctype Owner() {
	byte b = 0;
	byte lease = 0;
	bool silent;
	do
	:: lease < 2 ->
over:		state[lease] = OVER;
		silent = false;
in:		do
		:: users[lease] == 0 || lost[lease] || dead -> break
		:: users[lease] != 0 && !lost[lease] && !dead -> silent = true; break // for RevokeGrace
		:: users[lease] != 0 && !lost[lease] && !dead -> skip               // look again
		od;
		if
		:: !silent
		:: silent ->
moves:			turn(1 - lease, GOOD, MOVES);
#ifndef EARLY
drain:			do
			:: users[1 - lease] == 0 || lost[1 - lease] || dead -> break
			:: users[1 - lease] != 0 && !lost[1 - lease] && !dead -> break // for patience
			:: users[1 - lease] != 0 && !lost[1 - lease] && !dead -> skip
			od;
moved:			turn(1 - lease, MOVES, MOVED);
			replace(lease + 1);
#else
			replace(lease + 1);
			turn(1 - lease, MOVES, MOVED);
#endif
disown:			atomic { lost[0] = true; lost[1] = true }
		fi;
		proved[lease] = true;
		lease++
	:: else -> break
	od
}

init {
	atomic {
		run Batch(0, 0);
		run Batch(1, 1);
		run Batch(2, 0);
#ifdef MORTAL
		run Killer();
#endif
		run Owner()
	}
}
