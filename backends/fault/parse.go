// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// SyntaxError says where text is not a rule, and what could stand there.
type SyntaxError struct {
	Line, Column int    // from 1; in characters
	Found        string // what stands there; empty: the end
	Want         string
}

// Error names place, find and remedy.
func (e *SyntaxError) Error() string {
	found := "the end"
	if e.Found != "" {
		found = strconv.Quote(e.Found)
	}
	return fmt.Sprintf("fault rules: line %d, column %d: %s, want %s", e.Line, e.Column, found,
		e.Want)
}

// Parse reads rules, one a line or several with semicolons between them:
//
//	# comment
//	seed 7
//	write size>=64KiB p=0.01: delay 5ms±1ms
//	message every=100 most=3: flap 50ms; read peer=1 after=2s before=3s: fail lost
//
// In front of the colon stand an Event and the conditions of a Rule, in any order and each
// once: size and peer with >=, <= (both may be given) or =; after, before, skip, every,
// most and p with =. Behind it stands a Deed with what it takes, and an exclamation mark
// before those that break the contract. Errors are *SyntaxError.
func Parse(text string) (Rules, error) {
	var r Rules
	number, seeded := 0, false
	for line := range strings.SplitSeq(text, "\n") {
		number++
		line, _, _ = strings.Cut(line, "#")
		at := 0
		for statement := range strings.SplitSeq(line, ";") {
			s := scanner{line: number, column: at, rest: statement}
			at += utf8.RuneCountInString(statement) + 1
			if err := s.statement(&r, &seeded); err != nil {
				return Rules{}, err
			}
		}
	}
	return r, nil
}

// scanner takes words off one statement.
type scanner struct {
	line, column int // of rest; column from 0
	rest         string
	word         string // the last one taken
	at           int    // its column
}

// next takes a word. A colon is one of its own.
func (s *scanner) next() string {
	trimmed := strings.TrimLeft(s.rest, " \t\r")
	s.column += len(s.rest) - len(trimmed)
	end := strings.IndexAny(trimmed, " \t\r:")
	switch {
	case end < 0:
		end = len(trimmed)
	case end == 0 && trimmed != "":
		end = 1
	}
	s.word, s.rest, s.at = trimmed[:end], trimmed[end:], s.column
	s.column += utf8.RuneCountInString(s.word)
	return s.word
}

func (s *scanner) unexpected(want string, args ...any) error {
	return &SyntaxError{Line: s.line, Column: s.at + 1, Found: s.word,
		Want: fmt.Sprintf(want, args...)}
}

func (s *scanner) statement(r *Rules, seeded *bool) error {
	switch s.next() {
	case "":
		return nil
	case "seed":
		return s.seed(r, seeded)
	}
	if len(r.List) == RulesMax {
		return s.unexpected("at most %d rules", RulesMax)
	}
	var rule Rule
	first := *s
	if err := s.rule(&rule); err != nil {
		return err
	}
	if what := rule.flaw(); what != "" {
		return first.unexpected("a rule that can be: %s", what)
	}
	r.List = append(r.List, rule)
	return nil
}

func (s *scanner) seed(r *Rules, seeded *bool) error {
	if *seeded || len(r.List) > 0 {
		return s.unexpected("one seed, before all rules")
	}
	var ok bool
	if r.Seed, ok = parseCount(s.next()); !ok {
		return s.unexpected("a number for a seed")
	}
	*seeded = true
	return s.end()
}

func (s *scanner) end() error {
	if s.next() != "" {
		return s.unexpected("nothing more before the next line or semicolon")
	}
	return nil
}

// rule reads one whose first word has been taken.
func (s *scanner) rule(r *Rule) error {
	for _, n := range eventNames {
		if n.name == s.word {
			r.On = n.event
		}
	}
	if r.On == 0 {
		return s.unexpected("seed, or %s", eventList())
	}
	given := map[string]bool{}
	for s.next() != ":" {
		if s.word == "" {
			return s.unexpected("a colon and what to do: %s", deedList(r.On))
		}
		if err := s.condition(r, given); err != nil {
			return err
		}
	}
	return s.deed(r)
}

func eventList() string {
	var names []string
	for _, n := range eventNames {
		names = append(names, n.name)
	}
	return strings.Join(names, ", ")
}

func deedList(on Event) string {
	var names []string
	for _, f := range deedForms {
		if f.on&on != 0 {
			names = append(names, f.usage)
		}
	}
	return strings.Join(names, ", ")
}

const conditionList = "size>=, size<=, size=, peer>=, peer<=, peer=, after=, before=, skip=, " +
	"every=, most= or p=, or a colon"

// condition reads the word that has been taken.
func (s *scanner) condition(r *Rule, given map[string]bool) error {
	name, value, ok := strings.Cut(s.word, "=")
	if !ok {
		return s.unexpected(conditionList)
	}
	if given[name] || given[strings.TrimRight(name, "<>")] {
		return s.unexpected("%s once", name)
	}
	given[name] = true
	if base := strings.TrimRight(name, "<>"); base == "size" || base == "peer" {
		if name == base && (given[base+">"] || given[base+"<"]) {
			return s.unexpected("%s= or the ends of a range", base)
		}
		return s.interval(r, base, name[len(base):], value)
	}
	return s.setting(r, name, value)
}

// interval reads an end of a range, or all of it.
func (s *scanner) interval(r *Rule, base, comparison, value string) error {
	to, parse, want := &r.Size, parseSize, "a size such as 4096, 64KiB or 1MiB"
	if base == "peer" {
		to, parse, want = &r.Peer, parseCount, "the number of a connection, from 0"
	}
	n, ok := parse(value)
	if !ok {
		return s.unexpected("%s", want)
	}
	switch comparison {
	case "":
		to.Min, to.Exact = n, true
	case ">":
		to.Min = n
	case "<":
		if to.Max = n; n == 0 {
			return s.unexpected("%s=0, or an end above 0", base)
		}
	default:
		return s.unexpected(conditionList)
	}
	return nil
}

func (s *scanner) setting(r *Rule, name, value string) error {
	times := map[string]*time.Duration{"after": &r.After, "before": &r.Before}
	if to := times[name]; to != nil {
		d, ok := parseTime(value)
		if !ok || d == 0 {
			return s.unexpected("a time above 0 such as 5ms or 1.5s")
		}
		*to = d
		return nil
	}
	counts := map[string]*uint64{"skip": &r.Skip, "every": &r.Every, "most": &r.Most}
	if to := counts[name]; to != nil {
		n, ok := parseCount(value)
		if !ok || n == 0 {
			return s.unexpected("a number of at least 1")
		}
		*to = n
		return nil
	}
	if name != "p" {
		return s.unexpected(conditionList)
	}
	p, err := strconv.ParseFloat(value, 64)
	if err != nil || !plainNumber(value) || !(p > 0 && p <= 1) {
		return s.unexpected("a chance above 0 and at most 1")
	}
	if p < 1 { // always is how it is without
		r.Chance = p
	}
	return nil
}

// deed reads what stands behind the colon.
func (s *scanner) deed(r *Rule) error {
	s.next()
	for i := range deedForms {
		f := &deedForms[i]
		if f.name != s.word {
			continue
		}
		if f.on&r.On == 0 {
			return s.unexpected("what %v can be met with: %s", r.On, deedList(r.On))
		}
		r.Do = f.do
		if err := s.operands(r, f); err != nil {
			return err
		}
		return s.end()
	}
	return s.unexpected("%s", deedList(r.On))
}

func (s *scanner) operands(r *Rule, f *deedForm) error {
	switch f.takes {
	case timing:
		return s.timing(r)
	case span:
		return s.time(s.next(), &r.Time)
	case rate:
		return s.rate(r)
	case model:
		if err := s.time(s.next(), &r.Time); err != nil {
			return err
		}
		if err := s.time(s.next(), &r.PerPiece); err != nil {
			return err
		}
		return s.perSecond(r)
	case cause:
		return s.cause(r)
	}
	return nil
}

func (s *scanner) time(text string, to *time.Duration) (err error) {
	var ok bool
	if *to, ok = parseTime(text); !ok {
		return s.unexpected("a time such as 5ms or 1.5s, at most %v", TimeMax)
	}
	return nil
}

// timing reads 5ms±1ms, or 5ms+-1ms from a keyboard without the sign.
func (s *scanner) timing(r *Rule) error {
	word := strings.Replace(s.next(), "+-", "±", 1)
	base, jitter, ok := strings.Cut(word, "±")
	if err := s.time(base, &r.Time); err != nil || !ok {
		return err
	}
	return s.time(jitter, &r.Jitter)
}

func (s *scanner) perSecond(r *Rule) error {
	var ok bool
	if r.Rate, ok = parseRate(s.next()); !ok {
		return s.unexpected("a rate such as 50GB/s, 12.5GB/s or 100MB/s")
	}
	return nil
}

func (s *scanner) rate(r *Rule) error {
	if err := s.perSecond(r); err != nil || strings.TrimSpace(s.rest) == "" {
		return err
	}
	value, ok := strings.CutPrefix(s.next(), "burst=")
	if ok {
		r.Burst, ok = parseSize(value)
	}
	if !ok || r.Burst == 0 {
		return s.unexpected("burst= and a size, or nothing more")
	}
	return nil
}

func (s *scanner) cause(r *Rule) error {
	s.next()
	var names []string
	for _, e := range Errors {
		if e.Name == s.word {
			r.Err = e.Err
		}
		names = append(names, e.Name)
	}
	if r.Err == nil {
		return s.unexpected("%s", strings.Join(names, ", "))
	}
	return nil
}
