// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package rdma

import "github.com/sluicehq/sluice/csrc/verbs"

// openVerbs is not reached without cgo: verbs.Load refuses before, with the reason.
func openVerbs(verbs.Config) (fabric, error) { return nil, verbs.Load("") }
