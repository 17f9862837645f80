// SPDX-License-Identifier: Apache-2.0

package drivertest

import "github.com/sluicehq/sluice/driver"

// checks is the suite.
var checks = []check{
	{"Lengths", everywhere, 0, checkLengths},
	{"ManyDescriptors", everywhere, 0, checkManyDescriptors},
	{"NotKept", everywhere, 0, checkNotKept},
	{"Bounds", everywhere, 0, checkBounds},
	{"Keys", everywhere, 0, checkKeys},
	{"Can", everywhere, 0, checkCan},
	{"Only", everywhere, 0, checkOnly},
	{"Patterns", everywhere, driver.CanPattern, checkPatterns},
	{"PatternChanges", everywhere, driver.CanPattern, checkPatternChanges},
	{"Faults", everywhere, 0, checkFaults},
	{"NoAllocation", everywhere, 0, checkNoAllocation},

	{"Load", everywhere, 0, checkLoad},
	{"Full", everywhere, 0, checkFull},
	{"NoPoll", everywhere, 0, checkNoPoll},
	{"Cancel", everywhere, 0, checkCancel},
	{"CancelNothing", here, 0, checkCancelNothing},
	{"Drop", everywhere, 0, checkDrop},
	{"Help", everywhere, 0, checkHelp},
	{"Durable", here, driver.CanDurable, checkDurable},
	{"Together", everywhere, 0, checkTogether},

	{"MessageBehindItsBytes", everywhere, driver.CanNotify, checkMessageBehindItsBytes},
	{"MessageOrder", everywhere, driver.CanNotify, checkMessageOrder},
	{"MessageBackPressure", everywhere, driver.CanNotify, checkMessageBackPressure},
	{"MessageOfFailed", everywhere, driver.CanNotify, checkMessageOfFailed},
	{"LastMessage", everywhere, driver.CanNotify, checkLastMessage},
	{"Answers", apart, driver.CanNotify, checkAnswers},

	{"WakeCompletion", everywhere, 0, checkWakeCompletion},
	{"WakeMessage", everywhere, driver.CanNotify, checkWakeMessage},
	{"PingPong", apart, driver.CanNotify, checkPingPong},

	{"Tokens", everywhere, 0, checkTokens},
	{"Revoke", everywhere, 0, checkRevoke},
	{"RevokeUnderWrites", everywhere, 0, checkRevokeUnderWrites},
	{"RevokeFrozen", Processes, 0, checkRevokeFrozen},
	{"RevokeKilled", Processes, 0, checkRevokeKilled},
	{"RevokeParked", Processes, 0, checkRevokeParked},
	{"Renew", everywhere, 0, checkRenew},

	{"Random", everywhere, 0, checkRandom},

	{"Connect", everywhere, 0, checkConnect},
	{"PeerClose", everywhere, 0, checkPeerClose},
	{"BackendClose", everywhere, 0, checkBackendClose},
	{"PeerKilled", Processes, 0, checkPeerKilled},
	{"PeerFrozen", Processes, 0, checkPeerFrozen},
	{"PeerThawed", Processes, 0, checkPeerThawed},
	{"PeerSilent", Processes, 0, checkPeerSilent},
	{"Churn", everywhere, 0, checkChurn},
}
