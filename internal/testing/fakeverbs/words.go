// SPDX-License-Identifier: Apache-2.0

package fakeverbs

// Word is a word of the panel of a device: csrc/verbs/testdata/fakeverbs/control.h says what each
// means. A test may set those before Contexts and read the others.
type Word int

// The words, in the order of struct fake_panel.
const (
	Link Word = iota
	Fatal
	Frozen
	After
	Fail
	FailStatus
	Lose
	Late
	LateMicros
	Mute
	DelayMicros
	Rate
	RegisterErrno
	RegisterMicros
	RegisterWalks
	DeregisterBusy
	DeregisterEIO
	DeregisterMicros
	ReceiveBusy
	LockedKiB
	Garble
	GarbleAt
	DMABufErrno
	Blind
	Purge
	ModifyBusy
	DestroyBusy
	MaxSGE
	MaxInline
	MaxRequests
	MaxReceives
	MaxCQE
	Contexts
	Domains
	Regions
	Channels
	CompletionQueues
	ReceiveQueues
	QueuePairs
	Inlined
	Completions
	KiBLanded
	KiBLocked
	DMABufs
	Faults
	Overruns
	Unready
	LandedLate
	DroppedLate
	words
)

// names are those of struct fake_panel.
var names = [words]string{
	"link", "fatal", "frozen", "after", "fail", "fail_status", "lose", "late", "late_us",
	"mute", "delay_us", "rate",
	"register_errno", "register_us", "register_walks", "deregister_busy",
	"deregister_eio", "deregister_us", "receive_busy", "locked_kib", "garble", "garble_at",
	"dmabuf_errno", "blind", "purge", "modify_busy", "destroy_busy",
	"max_sge", "max_inline", "max_wr", "max_srq_wr", "max_cqe",
	"contexts", "pds", "mrs", "channels", "cqs", "srqs", "qps",
	"inlined", "completions", "kib_landed", "kib_locked",
	"dmabufs", "faults", "overruns", "unready", "landed_late", "dropped_late",
}
