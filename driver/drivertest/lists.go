// SPDX-License-Identifier: Apache-2.0

package drivertest

import "slices"

// Lists of checks, for Harness.Only of a backend that passes all checks in another harness. They
// follow what the harnesses differ in.
var (
	// Moving look at where bytes lie and how they are cut: all that a place, a kind of memory or
	// a limit can make different.
	Moving = []string{
		"Lengths", "DescsMax", "Neighbours", "SeveralMemories", "Pattern", "PatternMax", "Nest",
		"NestMax", "Load", "Full", "CancelWrite", "CancelRead", "NoAllocation", "Hammer",
		"DurableWrites", "DurablePattern",
	}

	// Streaming look at the order of what goes over connections: all that their addresses and
	// their number can make different.
	Streaming = []string{
		"Load", "NotifyAfterData", "NotifyOrder", "CancelWrite", "PeerClose",
		"LastMessageInFlight", "SilenceUnderWrites", "ArmPingPong", "Hammer",
	}

	// Apart are Streaming, and what depends on how two processes reach each other: all that
	// another carrier of the same protocol can make different.
	Apart = slices.Concat(Streaming, []string{
		"Lengths", "Pattern", "Only", "LastMessage", "AnswerOrder", "AnswerKilled", "BackendClose",
		"PeerKilled", "PeerFrozen", "FenceRevokes", "FenceOverFrozen", "FenceFrozen", "FenceKilled",
		"FenceFrozenReader", "FenceFrozenOnly", "FenceParked", "FenceStress",
	})

	// Alone are about one backend, connected to itself, and want no other wiring.
	Alone = []string{"Caps", "Register", "Explain"}
)
