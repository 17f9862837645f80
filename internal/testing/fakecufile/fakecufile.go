// SPDX-License-Identifier: Apache-2.0

// Package fakecufile builds the software stand-in of libcufile for tests, from testdata, and tells
// it what to do. It moves bytes between files and the memory of the stand-in of libcuda, and can do
// on command what libraries and disks do on bad days. It is not cuFile, and no measure of its
// speed.
//
// A process opens one library, so all tests of a binary share it, and those that command it do not
// run in parallel.
package fakecufile

import (
	"path/filepath"

	"github.com/sluicehq/sluice/internal/testing/standin"
)

// Word is a word of the stand-in's panel: testdata/standin_panel.h says what each means. A test may
// set those before Handles and read all.
type Word int

// The words, in the order of struct panel.
const (
	DelayMicros Word = iota
	Hold
	ShortMax
	EndAt
	FailAfter
	FailCode
	FailStatus
	BatchLimit
	BatchResult
	StatusResult
	CancelRefused
	OpenResult
	HandleResult
	RegisterResult
	DeregisterResult
	Direct
	Handles
	Buffers
	Batches
	UnderWay
	Reads
	Writes
	Submits
	Opens
	ChangedBlocks
	words
)

// names are those of struct panel.
var names = [words]string{
	"delay_us", "hold", "short_max", "end_at", "fail_after", "fail_code", "fail_status",
	"batch_limit", "batch_result",
	"status_result", "cancel_refused",
	"open_result", "handle_result", "register_result", "deregister_result", "direct",
	"handles", "buffers", "batches", "under_way",
	"reads", "writes", "submits", "opens",
	"changed_blocks",
}

// Library is a stand-in that was built. The environment must have its Panel as STANDIN_CUFILE_PANEL
// when it is opened.
type Library = standin.Library[Word]

// Build compiles it, with further flags: -DSTANDIN_OLD is a library without what is optional. It
// knows memory of devices by the stand-in of libcuda that the environment names as STANDIN_LIBCUDA
// when it is opened.
func Build(flags ...string) (*Library, error) {
	root, err := standin.Root()
	if err != nil {
		return nil, err
	}
	return standin.Source[Word]{
		Name: "libcufile",
		File: filepath.Join(root, "internal", "testing", "fakecufile", "testdata",
			"libcufile_standin.c"),
		Words: names[:], Owner: "cufile", First: Handles, Last: UnderWay,
	}.Build(flags...)
}
