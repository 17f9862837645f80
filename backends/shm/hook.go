// SPDX-License-Identifier: Apache-2.0

package shm

import "github.com/sluicehq/sluice/internal/hook"

// spot is a place between a check of a mover and the act that relies on it. Tests park
// movers there while the owner revokes.
type spot int

const (
	spotAnnounced  spot = iota // the owner may see the mover
	spotGeneration             // the generation is taken
	spotEpoch                  // the epoch was good
	spotMapped                 // the mapping is of the generation that was taken
	spotCopied                 // the bytes are placed, and the announcement stands
	spotLeft                   // the announcement is gone, the generation not looked at again
	spotGate                   // the place of the gate is taken
	spotPassing                // the epoch was good after that
)

// parked is what tests have a mover do at a spot.
var parked hook.Of[spot]
