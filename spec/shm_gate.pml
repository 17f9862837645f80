// SPDX-License-Identifier: Apache-2.0
//
// How shm revokes foreign memory, which a peer writes with process_vm_writev.
//
// Gates are numbered; a call begins with one byte for the page of a gate, and writes nothing
// when that is shut. The owner can see whether a thread is in the call, and nothing else of it.
// LATE: no byte is written once Revoke has returned.
//
// -DOLD takes the place of the gate behind the look at the epoch: a writer that is stopped in
// between takes the new gate.
//
// Which code each step is:
//
//   announce: initiator.go: move
//   spotGate, look, passing: foreign.go: passGate; tests park it at points of these names
//   bump, scan: proof.go: Revoke
//   renew: gate.go: renew: the new gate is told of, then the old one is shut
//   threads: internal/proc/threads.go: each thread was seen outside the call since
//   other: a revoke of other memory moves the gate, too

#ifndef MOVERS
#define MOVERS 2
#endif
#define GATES 3

byte epoch = 0;
byte gate = 0;            // in the owner's table
bool open[GATES];         // the page of the gate is writable
bool proved = false;
bool announced[MOVERS];
bool inCall[MOVERS];
bool dead = false;

inline write() {
	atomic { assert(!proved); skip }
}

proctype Mover(byte me) provided (!dead) {
	byte place;
	byte tries = 0;
announce: announced[me] = true;
	if
	:: epoch != 0 -> goto leave
	:: else
	fi;
	do
	:: tries < 3 ->
		tries++;
#ifndef OLD
spotGate:	place = gate;
#endif
look:		if
		:: epoch != 0 -> goto leave
		:: else
		fi;
#ifdef OLD
		place = gate;
#endif
passing:	inCall[me] = true;
		if
		:: !open[place] ->
			inCall[me] = false; // EFAULT
			if
			:: gate == place -> goto leave
			:: else // another gate by now: once more
			fi
		:: else ->
			write();
			write();
			inCall[me] = false;
			goto leave
		fi
	:: else -> goto leave
	od;
leave:	announced[me] = false
}

proctype Killer() {
	if
	:: dead = true
	:: skip
	fi
}

// Revokes is two revokes: the second is of other memory, and moves the gate under movers that
// it does not concern.
proctype Revokes() {
	byte i;
	bool silent = false;
bump:	epoch++;
scan:	i = 0;
	do
	:: i < MOVERS ->
		if
		:: !announced[i] || dead -> i++
		:: announced[i] && !dead -> silent = true; i++
		:: announced[i] && !dead -> skip // look again
		fi
	:: else -> break
	od;
	if
	:: silent ->
renew:		open[gate + 1] = true;
		gate++;
		open[gate - 1] = false;
threads:	i = 0;
		do
		:: i < MOVERS && (!inCall[i] || dead) -> i++
		:: i == MOVERS -> break
		od
	:: else
	fi;
	proved = true;
other:	open[gate + 1] = true;
	gate++;
	open[gate - 1] = false
}

init {
	atomic {
		open[0] = true;
		byte m;
		for (m : 0 .. MOVERS-1) { run Mover(m) }
		run Killer();
		run Revokes()
	}
}
