// SPDX-License-Identifier: Apache-2.0

package cuda

import "github.com/sluicehq/sluice/internal/hook"

// spot is a place where a batch or a sum is between a check and the act that relies on it, or
// between the act and its outcome. A test parks its goroutine there while the owner revokes. The
// spots of batches have the names of the steps in spec/cuda_processes.pml.
type spot int

const (
	spotAnnounced spot = iota // the batch is counted in the owner's sight
	spotGood                  // the import was good after that
	spotShown                 // cancels find the batch
	spotLaunched              // its copies are on a stream, or will be
	spotEnded                 // they have ended
	spotJudged                // and the import was still good after that
	spotBehind                // a sum has a stream wait for events
	spotHeld                  // the memory of a sum is there, and stays
)

// parked is what tests have a batch do at a spot.
var parked hook.Of[spot]
