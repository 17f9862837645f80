// SPDX-License-Identifier: Apache-2.0

package rdma

import "github.com/sluicehq/sluice/internal/hook"

// spot is a place between what a batch was checked by and its post. Tests park the goroutine of a
// batch there while the owner revokes. What C looks up it posts under one lock, in which nothing
// can be parked; there the NIC is the last to check the key.
type spot int

const spotSubmit spot = iota // the connection stands, and nothing is posted

// parked is what tests have a batch do at a spot.
var parked hook.Of[spot]
