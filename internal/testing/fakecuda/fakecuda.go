// SPDX-License-Identifier: Apache-2.0

// Package fakecuda builds the software stand-in of libcuda for tests, from cuda/testdata, and tells
// it what to do. It runs the same host code as a driver does, on threads of its own, and can do on
// command what devices do on bad days. It is no measure of speed.
//
// A process opens one driver, so all tests of a binary share it, and those that command it do not
// run in parallel.
package fakecuda

import (
	"path/filepath"

	"github.com/sluicehq/sluice/internal/testing/standin"
)

// Word is a word of the stand-in's panel: cuda/testdata/standin_panel.h says what each means. A
// test may set those before Streams and read all.
type Word int

// The words, in the order of struct panel.
const (
	DelayMicros Word = iota
	FaultAfter
	FaultResult
	RefuseAfter
	RefuseResult
	PinResult
	UnpinResult
	Hold
	Capture
	Streams
	Events
	Allocations
	HostAllocations
	Pins
	Reservations
	Mappings
	Handles
	Contexts
	Copies
	Launches
	words
)

// names are those of struct panel.
var names = [words]string{
	"delay_us", "fault_after", "fault_result", "refuse_after", "refuse_result", "pin_result",
	"unpin_result",
	"hold", "capture",
	"streams", "events", "allocations", "host_allocations", "pins", "reservations", "mappings",
	"handles", "contexts",
	"copies", "launches",
}

// Library is a stand-in that was built. The environment must have its Panel as STANDIN_PANEL when
// it is opened.
type Library = standin.Library[Word]

// Build compiles it, with further flags: -DSTANDIN_OLD is a driver without what is optional.
func Build(flags ...string) (*Library, error) {
	root, err := standin.Root()
	if err != nil {
		return nil, err
	}
	return standin.Source[Word]{
		Name: "libcuda", File: filepath.Join(root, "cuda", "testdata", "libcuda_standin.c"),
		Flags: []string{"-Wno-unknown-pragmas"}, Words: names[:], Owner: "cuda", First: Streams,
		Last: Contexts,
	}.Build(flags...)
}
