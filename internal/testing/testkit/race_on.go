// SPDX-License-Identifier: Apache-2.0

//go:build race

package testkit

// RaceEnabled says that the race detector is on.
const RaceEnabled = true
