#!/usr/bin/env bash
# The whole of agentrl in one go: environment, a tiny model, an epoch of GRPO through real workers, accuracy before and after.
set -euo pipefail
cd "$(dirname "$0")"
export PATH="$PWD/.venv/bin:$PATH"
parts=""

part() { # part NAME COMMAND...: runs it and remembers its seconds
    local name=$1 start=$SECONDS
    shift
    printf '\n== %s: %s\n' "$name" "$*"
    "$@"
    parts+=$(printf '  %-12s %4d s' "$name" $((SECONDS - start)))$'\n'
}

held_out=(--dataset arithmetic -n 256)

part environment "${MAKE:-make}" env
[ -f "${AGENTRL_HOME:-.agentrl}/models/tiny-arithmetic/config.json" ] || part warm-start agentrl sft --dataset arithmetic --model tiny --steps 250
run=quickstart
if agentrl events "$run" >/dev/null 2>&1; then run=quickstart-$(date +%m%d-%H%M%S); fi # the second time
part before agentrl eval --policy tiny "${held_out[@]}"
part train agentrl submit --dataset arithmetic --model tiny --epochs 1 --learning-rate 4e-4 -s update.decay=cosine --name "$run" --wait
part after agentrl eval --policy "$run" "${held_out[@]}"

cat <<END

== parts
$parts  all          $(printf '%4d' $SECONDS) s

== look closer (source .venv/bin/activate)
  agentrl watch $run            the reward curve, iteration by iteration
  agentrl episodes $run         every episode: task, answer, reward, tool calls
  agentrl replay EPISODE        one of them whole: messages, calls, results, logprobs
  agentrl sql "SELECT iteration, mean_reward, tokens FROM v_iterations WHERE run = '$run'"
  agentrl chat --policy $run    talk to what was trained

== where everything is
  ${AGENTRL_HOME:-$PWD/.agentrl}: agentrl.db (every run, episode, step and token count), models/, runs/ (checkpoints), stack/ (logs)
END
