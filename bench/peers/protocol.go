// SPDX-License-Identifier: Apache-2.0

package peers

// The descriptors of a driver.
const (
	requestsFD = 3
	answersFD  = 4
)

// What a Request asks for, by Request.Do. All of it concerns the end that is asked.
const (
	DoOpen    = "open"    // Lane, Role, Name, Bytes -> Version, Settings, Card
	DoConnect = "connect" // Card of the other end -> NS
	DoServe   = "serve"   // On: the other end works now; make progress if that is needed
	DoPrepare = "prepare" // Op, Size, Local, Remote: requests that will be posted in turn
	DoOnce    = "once"    // the first request, once -> NS
	DoGo      = "go"      // NS, Least: post requests in turn for so long -> Samples, Ops, NS
	DoDrop    = "drop"    // give the requests back
	DoStamp   = "stamp"   // Size, Slots, Seed: eight bytes at the front of each slot
	DoDigest  = "digest"  // Size, Slots -> CRC of their content
	// On: all of the file into the page cache; else written back, and nothing of it there
	DoCache = "cache"
	// Op, Size, Local, Remote: from lists to the last byte, nothing prepared -> PrepareNS, NS
	DoHandover = "handover"
	// Count, Size: register one by one, describe -> PrepareNS, NS, Bytes, Card
	DoRegions = "regions"
	DoPing    = "ping" // Count, Size: round trips -> Samples
	DoPong    = "pong" // Count, Size: answer them
	DoNull    = "null" // the cheapest call into the library -> Samples
	DoFate    = "fate" // NS: post in turn until an error -> Noticed, At, Text, Ops, Pending
)

// Request is one line to a driver.
type Request struct {
	ID    int    `json:"id"`
	Do    string `json:"do"`
	Lane  string `json:"lane,omitempty"`
	Role  string `json:"role,omitempty"` // RoleInitiator or RoleTarget
	Name  string `json:"name,omitempty"`
	Bytes uint64 `json:"bytes,omitempty"` // of memory to register
	Card  string `json:"card,omitempty"`
	On    bool   `json:"on,omitempty"`
	Op    string `json:"op,omitempty"` // "write" or "read"
	Size  uint64 `json:"size,omitempty"`
	// of each request the slots of its pieces, slots being Size bytes
	Local  [][]int32 `json:"local,omitempty"`
	Remote [][]int32 `json:"remote,omitempty"`
	Slots  []int32   `json:"slots,omitempty"`
	Seed   uint64    `json:"seed,omitempty"`
	NS     int64     `json:"ns,omitempty"`
	Least  int       `json:"least,omitempty"` // operations
	Count  int       `json:"count,omitempty"`
}

// The roles of an end.
const (
	RoleInitiator = "initiator"
	RoleTarget    = "target"
)

// Answer is one line from a driver. Times are nanoseconds.
type Answer struct {
	ID          int    `json:"id"`
	Error       string `json:"error,omitempty"`
	Unsupported string `json:"unsupported,omitempty"` // the peer has nothing of the kind, and why
	Version     string `json:"version,omitempty"`
	Settings    string `json:"settings,omitempty"`
	Card        string `json:"card,omitempty"` // what the other end needs; opaque to the harness
	NS          int64  `json:"ns,omitempty"`
	PrepareNS   int64  `json:"prepare_ns,omitempty"`
	// of one operation each; at most samplesMax of them
	Samples []int64 `json:"samples,omitempty"`
	Ops     int     `json:"ops,omitempty"`
	CRC     uint32  `json:"crc,omitempty"`
	Bytes   uint64  `json:"bytes,omitempty"`
	Noticed bool    `json:"noticed,omitempty"`
	Pending bool    `json:"pending,omitempty"` // an operation was under way when the time was over
	// CLOCK_MONOTONIC: of the error, or of the last operation that was done
	At   int64  `json:"at,omitempty"`
	Text string `json:"text,omitempty"` // of that error; of messages, what is to be known of them
}

// samplesMax bounds an answer: of more samples every second, third, ... is kept.
const samplesMax = 4096

// answerMax is how long a line from a driver may be; requests are ours.
const answerMax = 4 << 20
