// SPDX-License-Identifier: Apache-2.0

package drivertest

import "github.com/sluicehq/sluice/driver"

// checks is the suite.
var checks = []check{
	{"Lengths", anyWiring, 0, checkLengths},
	{"ManyDescriptors", anyWiring, 0, checkManyDescriptors},
	{"NotKept", anyWiring, 0, checkNotKept},
	{"Bounds", anyWiring, 0, checkBounds},
	{"Keys", anyWiring, 0, checkKeys},
	{"Can", anyWiring, 0, checkCan},
	{"Only", anyWiring, 0, checkOnly},
	{"Patterns", anyWiring, driver.CanPattern, checkPatterns},
	{"PatternChanges", anyWiring, driver.CanPattern, checkPatternChanges},
	{"Faults", anyWiring, 0, checkFaults},
	{"NoAllocation", anyWiring, 0, checkNoAllocation},

	{"Load", anyWiring, 0, checkLoad},
	{"Full", anyWiring, 0, checkFull},
	{"NoPoll", anyWiring, 0, checkNoPoll},
	{"Cancel", anyWiring, 0, checkCancel},
	{"CancelNothing", oneProcess, 0, checkCancelNothing},
	{"Drop", anyWiring, 0, checkDrop},
	{"Help", anyWiring, 0, checkHelp},
	{"Durable", oneProcess, driver.CanDurable, checkDurable},
	{"Together", anyWiring, 0, checkTogether},

	{"MessageBehindItsBytes", anyWiring, driver.CanNotify, checkMessageBehindItsBytes},
	{"MessageOrder", anyWiring, driver.CanNotify, checkMessageOrder},
	{"MessageBackPressure", anyWiring, driver.CanNotify, checkMessageBackPressure},
	{"MessageOfFailed", anyWiring, driver.CanNotify, checkMessageOfFailed},
	{"LastMessage", anyWiring, driver.CanNotify, checkLastMessage},
	{"Answers", twoBackends, driver.CanNotify, checkAnswers},

	{"WakeCompletion", anyWiring, 0, checkWakeCompletion},
	{"WakeMessage", anyWiring, driver.CanNotify, checkWakeMessage},
	{"PingPong", twoBackends, driver.CanNotify, checkPingPong},

	{"Tokens", anyWiring, 0, checkTokens},
	{"Revoke", anyWiring, 0, checkRevoke},
	{"RevokeUnderWrites", anyWiring, 0, checkRevokeUnderWrites},
	{"RevokeFrozen", Processes, 0, checkRevokeFrozen},
	{"RevokeKilled", Processes, 0, checkRevokeKilled},
	{"RevokeParked", Processes, 0, checkRevokeParked},
	{"Renew", anyWiring, 0, checkRenew},

	{"Random", anyWiring, 0, checkRandom},

	{"Connect", anyWiring, 0, checkConnect},
	{"PeerClose", anyWiring, 0, checkPeerClose},
	{"BackendClose", anyWiring, 0, checkBackendClose},
	{"PeerKilled", Processes, 0, checkPeerKilled},
	{"PeerFrozen", Processes, 0, checkPeerFrozen},
	{"PeerThawed", Processes, 0, checkPeerThawed},
	{"PeerSilent", Processes, 0, checkPeerSilent},
	{"Churn", anyWiring, 0, checkChurn},
}
