// SPDX-License-Identifier: Apache-2.0
//
// How a chain ends: a write in PIECES pieces through one slot.
//
// The initiator moves a piece into staging memory of the peer, and a request follows it. The
// peer's engine makes the last hop, by a device that places each piece in two steps, and
// answers. The program aborts at any moment; the connection is cut at any moment, after which
// what was under way arrives or does not, and acknowledgements do not; the owner revokes the
// target's lease at any moment. Each statement is one step, so any of them may be stopped for
// any time; a process that is killed is never scheduled again.
//
// LATE: no byte is placed once the outcome was told and is proved (Abort returns nil, or Err is
// final), nor once Revoke has returned nil. TOLD: an outcome is told once.
//
// Mistakes: -DREFUSED: a request whose acknowledgement was lost is taken for one that the peer
// never got. -DPASSED: the owner counts the hops under way, and then ends the epoch.
//
// Not in the model: reads, and the local backends' own proofs.
//
// Which code each step is:
//
//   by, acknowledgement, cancel: chain_slot.go: prepareHop, hopEnded, failed
//   hand, withdraw, giveUp: chain_slot.go: await, stop, giveUp, withdraw
//   enter, stop, place, finish: chain_window.go: begin, withdraw, post, finish
//   end, quiet: chain_memory.go: Revoke
//   cut: chain_window.go: end; chain_peer.go: carrierLost

#ifndef PIECES
#define PIECES 2
#endif

mtype = { put, withdrawn };

chan requests = [4] of { mtype, byte };
chan answers = [4] of { byte };

bool cut = false;            // the connection
bool lost = false;           // and the initiator knows
bool aborting = false;
bool told = false;           // the outcome
bool unanswered = false;     // it is ErrUnproven
bool revoked = false;        // Revoke has returned nil

byte epoch = 0;
byte inHand = 0;             // hops that were admitted
byte hop = 0;                // the piece that the peer has in hand; 0: none
bool stop = false;           // it is to end
bool posted = false;         // the device has it
bool over = false;           // it has ended
bool ending = false;         // the owner wants the hops to end

inline tell() {
	atomic { assert(!told); told = true } // TOLD
}

proctype Initiator() {
	byte number = 0, got;
	bool failed, asked;
	do
	:: number == PIECES || aborting || failed -> break
	:: else ->
		number++;
		asked = false;
		requests!put, number; // [by]
		if // the end of the batch
		:: !cut -> skip
		:: cut -> failed = true // [acknowledgement]
		:: aborting && !cut ->
			atomic {
				if
				:: requests??[put, eval(number)] -> requests??put, eval(number) // [cancel]
				:: else
				fi
			};
			failed = true
		fi;
#ifdef REFUSED
		if
		:: failed -> break
		:: else
		fi;
#endif
		do // [hand]
		:: atomic { answers?got ->
				if
				:: got == number -> break
				:: else
				fi
			}
		:: (aborting || failed) && !asked -> asked = true;
			if
			:: cut -> skip
			:: !cut && nfull(requests) -> requests!withdrawn, number // [withdraw]
			fi
		:: lost -> unanswered = true; failed = true; break // [giveUp]
		od
	od;
	tell()
}

// Peer is the loop of a window.
proctype Peer() {
	byte number;
end:	do
	:: requests?put, number ->
		if
		:: hop != 0 -> answers!number
		:: else ->
			atomic { // [enter]
				if
				:: epoch == 0 -> inHand++; stop = false; over = false; hop = number; posted = true
				:: else -> answers!number
				fi
			}
		fi
	:: requests?withdrawn, number ->
		if
		:: hop == number -> stop = true // [stop]
		:: else -> answers!number
		fi
	:: atomic { over -> over = false; inHand-- }; // [finish]
		number = hop;
		hop = 0;
		if
		:: cut
		:: !cut && nfull(answers) -> answers!number
		fi
	:: hop != 0 && !stop && (ending || cut) -> stop = true
	od
}

inline place() {
	assert(!revoked && !(told && !unanswered)) // LATE
}

// Device makes the last hop.
proctype Device() {
end:	do
	:: atomic { posted -> posted = false };
		if
		:: stop -> skip
		:: else ->
			place(); // [place]
			if
			:: stop -> skip
			:: else -> place()
			fi
		fi;
		over = true
	od
}

// Owner is Lease.Revoke.
proctype Owner() {
#ifdef PASSED
	byte n = inHand;
	epoch++;
	if
	:: n == 0 -> skip
	:: else -> ending = true; inHand == 0
	fi;
#else
	bool quiet;
	atomic { epoch++; quiet = inHand == 0 }; // [end]
	if
	:: quiet -> skip
	:: else -> ending = true; inHand == 0 // [quiet]
	fi;
#endif
	revoked = true
}

proctype Program() {
	aborting = true
}

proctype Network() {
	byte any;
	cut = true;
	lost = true;
end:	do
	:: requests?put, any // what was under way and does not arrive
	:: requests?withdrawn, any
	:: answers?any
	od
}

init {
	atomic {
		run Initiator();
		run Peer();
		run Device();
		run Owner();
		run Program();
		run Network()
	}
}
