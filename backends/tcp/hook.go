// SPDX-License-Identifier: Apache-2.0

package tcp

import "github.com/sluicehq/sluice/internal/hook"

// spot is a place between a check of an owner, as it lands what a peer sent, and the act that
// relies on it. Tests park the reading goroutine there while the memory is revoked.
type spot int

const (
	spotAimed    spot = iota // the head of a write was read, and its ticket was good
	spotReceived             // bytes were read, or are about to be: nothing is checked for them
	spotTicket               // the gate is held and the ticket is good; the age is not checked
	spotChecked              // so is the age: the piece is about to land
	spotLanded               // the piece has landed, and the gate is held
)

// parked is what tests have an owner do at a spot.
var parked hook.Of[spot]
